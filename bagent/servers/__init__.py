"""Resolution of a job or a hostfile to endpoints, and construction of fleets over them.

resolve          backend or hostfile -> endpoints with keys and proxies
hosted           addresses, headers and settings of providers
host_selection   `select:`, the endpoints of a hostfile that a stage uses
startup_probe    which endpoints answer and serve the requested models
server_pool      the servers of a run, resolved and probed
fleet_factory    a fleet and its endpoints' limits
pricing          prices and the budget
"""
