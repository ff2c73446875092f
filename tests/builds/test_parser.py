"""Reading Dockerfiles: what instructions become, and how each mistake is explained."""

from __future__ import annotations

import pytest

from atoll.builds.dockerfile import heredocs
from atoll.builds.dockerfile.instructions import (
    Command,
    Copy,
    DeclaredVolumes,
    Env,
    Healthcheck,
    Heredoc,
    Instruction,
    Mount,
    Run,
)
from atoll.builds.dockerfile.parser import parse
from atoll.errors import DockerfileError


def only(text: str) -> Instruction:
    """The one instruction after FROM."""
    [stage] = parse(f"FROM base\n{text}".encode()).stages
    [instruction] = stage.instructions
    return instruction


def refused(text: str) -> DockerfileError:
    with pytest.raises(DockerfileError) as error:
        parse(text.encode())
    return error.value


def test_stages_and_arguments_are_told_apart() -> None:
    read = parse(b"# syntax=docker/dockerfile:1\nARG A=1 B\nFROM x:$A AS One\nRUN a\nfrom one\nENV b=c\n")
    assert read.syntax == "docker/dockerfile:1"
    assert [argument.names for argument in read.arguments] == [(("A", "1"), ("B", None))]
    assert [(stage.base, stage.name, len(stage.instructions)) for stage in read.stages] == [
        ("x:$A", "one", 1),
        ("one", "", 1),
    ]


def test_an_instruction_knows_its_lines() -> None:
    run = only("\n# comment\nRUN a \\\n  # inside\n  && b")
    assert (run.place.file, run.place.line, run.place.last_line) == ("Dockerfile", 4, 6)
    assert run.text == "RUN a   && b"


def test_run_has_two_forms() -> None:
    shell, exec_form = only("RUN echo $HOME"), only('RUN ["echo", "$HOME"]')
    assert isinstance(shell, Run)
    assert shell.command == Command(("echo $HOME",), is_shell=True)
    assert isinstance(exec_form, Run)
    assert exec_form.command == Command(("echo", "$HOME"), is_shell=False)


def test_what_is_no_json_is_a_command_line() -> None:
    run = only("RUN ['a', 'b']")
    assert isinstance(run, Run)
    assert run.command == Command(("['a', 'b']",), is_shell=True)


def test_here_documents_of_run_become_its_command() -> None:
    one = only("RUN <<EOF\necho $A\nEOF")
    several = only("RUN cat <<A <<'B'\n1\nA\n2\nB")
    program = only("RUN <<EOF\n#!/bin/python\nprint()\nEOF")
    assert isinstance(one, Run)
    assert isinstance(several, Run)
    assert isinstance(program, Run)
    assert heredocs.shell_text(one) == "echo $A\n"
    assert heredocs.shell_text(several) == "cat <<A <<'B'\n1\nA\n2\nB"
    assert heredocs.script(one) is None
    assert heredocs.script(program) == Heredoc("EOF", "#!/bin/python\nprint()\n", expand=True)


def test_tabs_before_lines_of_a_here_document_may_be_left_out() -> None:
    run = only("RUN <<-EOF\n\tone\n\t\ttwo\n  three\n\tEOF")
    assert isinstance(run, Run)
    assert run.heredocs[0].content == "one\ntwo\n  three\n"


def test_a_quoted_name_keeps_variables_in_a_here_document() -> None:
    copy = only("COPY <<A <<'B' <<\"C\" /x/\n1\nA\n2\nB\n3\nC")
    assert isinstance(copy, Copy)
    assert [(each.name, each.expand) for each in copy.heredocs] == [("A", True), ("B", False), ("C", False)]
    assert (copy.sources, copy.target) == ((), "/x/")


def test_flags_of_copy() -> None:
    copy = only("COPY --from=a --chown=1:2 --chmod=0755 --link --exclude=x --exclude=y s t /d")
    assert isinstance(copy, Copy)
    assert (copy.source_stage, copy.owner, copy.mode, copy.link, copy.exclude) == ("a", "1:2", "0755", True, ("x", "y"))
    assert (copy.sources, copy.target) == (("s", "t"), "/d")


def test_mounts_of_run() -> None:
    run = only(
        "RUN --mount=type=cache,target=/c,id=i,sharing=locked,mode=0700,uid=1,gid=2 "
        "--mount=type=secret,id=s,required --mount=src=a,dst=/b,rw "
        "--mount=type=tmpfs,target=/t,size=2m --network=none x"
    )
    assert isinstance(run, Run)
    assert run.network == "none"
    assert run.mounts == (
        Mount("cache", target="/c", id="i", writable=True, sharing="locked", mode=0o700, uid=1, gid=2),
        Mount("secret", id="s", required=True),
        Mount("bind", target="/b", source="a", writable=True),
        Mount("tmpfs", target="/t", writable=True, size_bytes=2 << 20),
    )


def test_env_has_two_forms() -> None:
    pairs, one = only('ENV a=b c="d e" f=g\\ h'), only("ENV a b  c")
    assert isinstance(pairs, Env)
    assert pairs.variables == (("a", "b"), ("c", '"d e"'), ("f", "g\\ h"))
    assert isinstance(one, Env)
    assert one.variables == (("a", "b  c"),)


def test_other_instructions() -> None:
    health, none, volume = only("HEALTHCHECK --interval=5s CMD a b"), only("HEALTHCHECK none"), only("VOLUME /a /b")
    assert isinstance(health, Healthcheck)
    assert health.options == {"interval": "5s"}
    assert health.command == Command(("a b",), is_shell=True)
    assert isinstance(none, Healthcheck)
    assert none.command is None
    assert isinstance(volume, DeclaredVolumes)
    assert volume.paths == ("/a", "/b")


def test_the_escape_character_can_be_another_one() -> None:
    read = parse(b"# escape=`\nFROM x\nRUN a `\n b\\\nENV c=d\n")
    assert [each.text for each in read.stages[0].instructions] == ["RUN a  b\\", "ENV c=d"]


@pytest.mark.parametrize(
    ("text", "line", "reason", "hint"),
    [
        ("", 1, "no FROM", "FROM IMAGE"),
        ("RUN x", 1, "no FROM before", "Begin with"),
        ("FROM a b", 1, "FROM has one word", "FROM IMAGE"),
        ("FROM a AS 1x", 1, "cannot be the name of a stage", "letter"),
        ("FROM a\n\nCPOY a b", 3, "no instruction 'CPOY'", "Did you mean COPY?"),
        ("FROM a\nFRON b", 2, "no instruction", "FROM"),
        ("FROM a\nXYZZY b", 2, "no instruction", "There are FROM"),
        ("FROM a\nONBUILD RUN x", 2, "ONBUILD is not supported", "without ONBUILD"),
        ("FROM a\nRUN", 2, "RUN has no command", "RUN ["),
        ("FROM a\nRUN --mount=type=ssh x", 2, "ssh", "secret"),
        ("FROM a\nRUN --mount=type=chache,target=/x y", 2, "no type", "cache"),
        ("FROM a\nRUN --mount=target=/x,tarhet=/y z", 2, "no option", "target"),
        ("FROM a\nRUN --mount=type=cache x", 2, "no target", "--mount="),
        ("FROM a\nRUN --mount=type=secret x", 2, "no id", "id=NAME"),
        ("FROM a\nRUN --mount=type=bind,target=/a,mode=0700 x", 2, "no option 'mode'", "It has"),
        ("FROM a\nRUN --mount=from=$x,target=/y z", 2, "variable", "FROM $IMAGE AS NAME"),
        ("FROM a\nRUN --network=host x", 2, "--network='host'", "policy of the build"),
        ("FROM a\nRUN --security=insecure x", 2, "not supported", "sandbox"),
        ("FROM a\nCOPY --form=b c d", 2, "no flag '--form'", "--from"),
        ("FROM a\nCOPY --from b c", 2, "--from has no value", "--from=…"),
        ("FROM a\nCOPY --link=maybe b c", 2, "--link is 'maybe'", "--link=true"),
        ("FROM a\nCOPY --from=b --from=c d e", 2, "twice", "one of them"),
        ("FROM a\nCOPY x", 2, "no target", "TARGET"),
        ("FROM a\nCOPY x <<E\nE", 2, "target", "TARGET"),
        ("FROM a\nCOPY <<E /x\nabc", 2, "'E' does not end", "nothing else"),
        ("FROM a\nENV x", 2, "no value for 'x'", "NAME=VALUE"),
        ("FROM a\nENV a=b c", 2, "without '='", "NAME=VALUE"),
        ("FROM a\nENV =b", 2, "no name", "NAME=VALUE"),
        ("FROM a\nSHELL bash -c", 2, "JSON", '["PROGRAM"'),
        ("FROM a\nRUN [1]", 2, "something else in it than strings", "double quotes"),
        ("FROM a\nHEALTHCHECK --interval=often CMD x", 2, "--interval", "30s"),
        ("FROM a\nHEALTHCHECK RUN x", 2, "CMD or NONE", "HEALTHCHECK"),
        ("# escape=x\nFROM a", 1, "escape character", "`"),
        ("# syntax=a\n# syntax=b\nFROM a", 2, "second", "one of them"),
        ("FROM a\nRUN a\0b", 2, "NUL", "Remove it"),
    ],
)
def test_a_mistake_is_explained_with_file_line_and_hint(text: str, line: int, reason: str, hint: str) -> None:
    error = refused(text)
    assert error.reason.startswith(f"Dockerfile:{line}: ")
    assert reason in error.reason
    assert error.hint is not None
    assert hint in error.hint


def test_a_message_has_no_control_characters_and_is_short() -> None:
    error = refused("FROM a\n\x1b[31m" + 60_000 * "x" + " y")
    assert "\x1b" not in str(error)
    assert len(str(error)) < 300


def test_comments_may_be_in_any_encoding_but_instructions_are_utf_8() -> None:
    assert parse(b"# caf\xe9\nFROM a\nRUN a \\\n# \xff\n b\n").stages[0].instructions[0].text == "RUN a  b"
    with pytest.raises(DockerfileError, match=r"^Dockerfile:2: byte 8 of the line is not UTF-8"):
        parse(b"FROM a\nRUN caf\xe9\n")
