"""The fleet: which endpoint gets the next request, and what happens to the calls after it.

fleet                           calls in, requests out, results back
call                            records: calls, requests, and what is to be done about them
state                           endpoints, counters, background tasks, notices and samples
queue, scheduler, batch_size    which calls go next, and how many share a request
prefix_affinity, context_length, tail_latency   which endpoint suits them
exchanges                       requests: sent with a task or without; what their results mean
retry                           rules by which calls are sent again
endpoint_state                  endpoints: their circuit breakers, and which is next
health                          probes, checks, silence, and the end of all endpoints
limits                          concurrency, pace, quotas, reported load
hostfile, health_check, leases  hostfiles; `bagent hosts`; endpoints for the proxy

How a retry works
-----------------
`exchanges.py:ResultHandler.handle` gets the 429 as an `Exchange` from the backend, frees its slot
and records the attempt, and `exchanges.py:ResultHandler._throttle` slows account and endpoint down
(`limits/account.py:Account.on_refusal`).
`retry.py:RetryRules.after_failure` goes through the rules of its table. `retry.py:count_and_decide`
computes the delay, and the rule returns `Retry(call, at)`, or `Fail` if the attempts are
used up. `fleet.py:Fleet._apply` does what it says: `queue.py:CallQueues.sleep` keeps the call until
`at`. Then the timer starts `fleet.py:Fleet._pump`, `queue.py:CallQueues.wake` makes the call ready,
and the next endpoint with room gets it (`fleet.py:Fleet._start`).
Where only a probe or check can decide, the action is `Suspend`; `fleet.py:Fleet.on_probe` and
`fleet.py:Fleet.on_check` ask the rules again when `health.py:Health` has the result.

How a hostfile reload works
---------------------------
`runs/hostfile_reload.py:HostfileFollower.follow` reads the file every second
(`hostfile.py:read_content`). `hostfile.py:HostfileWatch.on_content` waits until it has not changed
for a second, parses it (`hostfile.py:hosts_in`), and drops it with a notice if it has a fault.
`runs/hostfile_reload.py:HostfileFollower._usable` applies `select:` and looks up the keys.
Endpoints that are gone, or have other tags, leave: `fleet.py:Fleet.leave` calls
`health.py:Health.leave`, and their requests in flight finish.
New ones join: `fleet.py:Fleet.join` calls `health.py:Health.join`, and a probe comes before the
first call (`health.py:Health.probe`).
"""
