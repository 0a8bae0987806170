from adaptivespec.provenance import git_revision, provenance


def test_provenance_names_machine_versions_and_command():
    found = provenance()
    assert "cores" in found["processor"]
    assert "sglang" in found["versions"]
    assert found["command"]
    assert all(isinstance(text, str) and text for text in found.values())


def test_no_revision_outside_a_checkout(tmp_path):
    assert git_revision(tmp_path) == "not a git checkout"
