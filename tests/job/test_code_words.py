"""Which words of a command line are code, and that no place may stand in them."""

from __future__ import annotations

import pytest

from bagent.job.spec.agent import code_words

# CODE marks the words that have to be found, in each line all of them.
COMMANDS = """
sh -c CODE
bash -lc CODE x
bash -o pipefail -ec CODE
bash --rcfile f -c CODE
sh -s CODE
zsh -fc CODE
env A=b sh -c CODE
env -S CODE
timeout 5 bash -c CODE
docker run --rm image sh -c CODE
find . -exec sh -c CODE ;
flock file -c CODE
script -qc CODE /dev/null
watch CODE CODE
ssh CODE CODE CODE
/usr/bin/python3.11 -Ic CODE a
python3 -cCODE
python -W ignore -c CODE
python script.CODE -c x
perl -ne CODE file
ruby -e CODE
node --eval=CODE
php -r CODE
Rscript -e CODE
awk -F : CODE file
awk -f program.CODE file
sed -i CODE file
psql -d x -c CODE
sqlite3 file CODE CODE
sqlite3 -cmd CODE file CODE
duckdb -readonly -csv file CODE
node -pe CODE
node --require m -e CODE x
sbatch --wrap CODE
make --eval=CODE all
pwsh -Command CODE
grep -r x docs
"""


@pytest.mark.parametrize("line", COMMANDS.strip().splitlines())
def test_the_words_that_an_interpreter_runs_are_found(line: str) -> None:
    argv = line.split()
    expected = {place for place, word in enumerate(argv) if "CODE" in word}
    assert set(code_words(argv)) == expected


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("{command: [sh, -c, 'echo {id}']}", r"{id} stands in code that a shell.*\$1"),
        ("{command: [bash, -lc, 'run {prompt}']}", "{prompt} stands in code"),
        ("{command: [sh, -c, 'echo $1', sh, '{id}']}", None),
        ("{command: [sh, -c, 'awk {print}']}", None),
        ("{command: ['{id}']}", "{id} would choose the program"),
        ("{command: [opencode, --key, '{key}']}", "{key} stands in the command"),
        ("{tools: [{name: t, command: [python, -c, 'f({{x}})', '{x}']}]}", None),
        ("{tools: [{name: t, command: [ssh, host, grep, '{x}']}]}", "{x} stands in code"),
    ],
)
def test_a_place_inside_code_is_refused_with_the_way_to_pass_it(load, agent, message):
    text = f"input: rows.jsonl\nprompt: x\nagent: {agent}\n"
    if message is None:
        load(text)
        return
    with pytest.raises(Exception, match=message):
        load(text)
