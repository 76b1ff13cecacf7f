from __future__ import annotations

from bagent.cli.commands.report import names_in_prompts
from support.jobs import write_job
from support.replies import ok


def test_a_run_gets_its_page_with_every_row_and_number(bagent, fs, job_dir):
    fs.set_script({"r2": [ok("<script>alert(1)</script>")], "*": [ok("fine")]})
    write_job(job_dir, fs.url, 5)
    assert bagent(["run", "job.yaml", "--progress", "none"]).code == 0
    done = bagent(["report"])
    assert (done.code, done.out) == (0, "")
    assert "report.html" in done.err
    page = (job_dir / "runs" / "job" / "report.html").read_text()
    assert "<title>job</title>" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert page.count("<script>") == 1
    assert "text number 3" in page
    assert bagent(["report", "job", "-o", "out.html"]).code == 0
    assert (job_dir / "out.html").stat().st_size > 5000
    assert bagent(["report", "job", "-o", "missing/out.html"]).code == 74


def test_the_names_that_prompts_use_are_found_in_texts_and_files(tmp_path):
    file = tmp_path / "system.md"
    file.write_text("{% if style is defined %}Write in {{ style }}{% endif %}")
    job = {"prompt": {"user": "{{ title }} of {{ row_count | default('notes') }}"}}
    found = names_in_prompts(
        job | {"stages": [{"prompt": {"system": {"file": str(file)}}}]}, files=True
    )
    assert found is not None
    assert {"title", "style", "row_count"} <= found
    assert "notes" not in found


def test_a_prompt_that_uses_the_whole_row_or_a_lost_file_tells_nothing_of_fields(tmp_path):
    assert names_in_prompts({"prompt": {"user": "{{ row }}"}}, files=True) is None
    assert names_in_prompts({"prompt": {"user": "words"}}, files=True) is None
    lost = {"prompt": {"user": "{{ a }}", "system": {"file": str(tmp_path / "gone.md")}}}
    assert names_in_prompts(lost, files=True) is None
