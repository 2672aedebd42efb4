from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import pytest

from toka_async.text.chat import ChatTemplate, ChatTemplateError, TemplateKwargsError

CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<' + message['role'] + '>' + message['content'] + '</>\\n' -}}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "    {{- '<assistant>' -}}\n"
    "{% endif %}"
)
USER = {"role": "user", "content": "hi"}


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages or (USER,), **options)


def test_render() -> None:
    assert render(CHATML, USER, {"role": "assistant", "content": "yo"}, USER) == (
        "<user>hi</>\n<assistant>yo</>\n<user>hi</>\n<assistant>"
    )
    assert render(CHATML, add_generation_prompt=False) == "<user>hi</>\n"


def test_what_a_template_sees() -> None:
    assert render("{{ bos_token }}{{ eos_token is defined }}") == "<s>False"
    assert render("{{ tools is none }}") == "True"
    assert render("{{ tools[0].name }}", tools=[{"name": "f"}]) == "f"
    assert render("{{ enable_thinking }}", kwargs={"enable_thinking": False}) == "False"
    assert render("{{ x is defined }}{% for m in messages %}{% break %}{% endfor %}") == "False"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render("{{ messages[0] | tojson }}", {"role": "user", "content": "<é>"}) == json.dumps(
        {"role": "user", "content": "<é>"}, ensure_ascii=False
    )
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"
    assert render("{% set ns = namespace(a=1) %}{% set ns.a = 2 %}{{ ns.a }}{{ range(3) | list }}") == "2[0, 1, 2]"


def test_messages_are_made_plain() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", {"role": "user", "content": parts}) == "a\nb"
    assert render("{{ 'name' in messages[0] }}", USER | {"name": None}) == "False"
    assert render("{{ messages[0].reasoning_content }}", USER | {"reasoning": "because"}) == "because"
    message = {"role": "user", "content": parts}
    render("{{ messages }}", message)
    assert message == {"role": "user", "content": parts}


@pytest.mark.parametrize(
    ("content", "expected"),
    [("The answer", "<user>hi</>\n<assistant>The answer"), (" is ", "<user>hi</>\n<assistant> is ")],
)
def test_continue_final_message(content: str, expected: str) -> None:
    final = {"role": "assistant", "content": content}
    assert render(CHATML, USER, final, add_generation_prompt=False, continue_final_message=True) == expected


def test_continue_final_message_with_a_template_that_trims() -> None:
    trims = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    final = {"role": "assistant", "content": "x  "}
    assert render(trims, USER, final, add_generation_prompt=False, continue_final_message=True) == "[hi][x"


@pytest.mark.parametrize(
    ("source", "final", "message"),
    [
        (CHATML, {"role": "assistant"}, "with content"),
        ("{{ messages | length }}", USER, "with content"),
        ("content {{ messages | length }}", USER, "leaves out"),
    ],
)
def test_continue_final_message_impossible(source: str, final: dict[str, Any], message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(source, final, add_generation_prompt=False, continue_final_message=True)


def test_continue_final_message_excludes_a_generation_prompt() -> None:
    with pytest.raises(ChatTemplateError, match="add_generation_prompt"):
        render(CHATML, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[5].content }}", "no element 5"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{{ ().__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for a in range(99999999) %}{% endfor %}", r"range\(\) gave more"),
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", r"range\(\) gave more"),
        ("{{ 'ab' * 99999999 }}", "makes more than"),
        ("{{ 99999999 * ['ab'] }}", "makes more than"),
        ("{{ 9 ** 9 ** 9 ** 9 ** 9 }}", r"\*\* makes a number"),
        ("{{ raise_exception('x' * 100000) }}", "^chat template: x{1000}$"),
        ("{{ strftime_now('%Y' * 1000) }}", "a format of at most"),
    ],
)
def test_errors_and_limits_of_templates(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ ''.__getattribute__('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{a.__class__}'.format_map({'a': messages}) }}",
        "{{ messages|map(attribute='__class__')|first }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].popen('echo root:').read() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__.co_consts }}",
        "{{ range.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages[0].update({'content': 'changed'}) }}",
        "{{ messages.pop() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.getcwd() }}",
        "{% extends '/etc/passwd' %}",
    ],
)
def test_a_template_gets_out_of_nothing(source: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    try:
        text = ChatTemplate(source).render(messages)
    except ChatTemplateError as error:
        text = "" if re.search("unsafe|no loader|is undefined", str(error)) else str(error)
    assert text == ""
    assert messages == [{"role": "user", "content": "hello"}]


def test_what_clients_send_is_no_template() -> None:
    text = "{{ 7 * 7 }}{% include '/etc/passwd' %}"
    template = ChatTemplate("{{ messages[0].content }}{{ extra }}")
    assert template.render([{"role": "user", "content": text}], kwargs={"extra": text}) == text + text


def test_a_prompt_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toka_async.text.chat.MAX_CHARS", 1000)
    with pytest.raises(ChatTemplateError, match="the prompt has more than 1000 characters"):
        render("{% for a in range(9999) %}ab{% endfor %}")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "range"])
def test_reserved_names(name: str) -> None:
    with pytest.raises(TemplateKwargsError, match=f"must not set '{name}'"):
        render(CHATML, kwargs={name: "x"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": "x"}], "'image_url' are not supported"),
        ([3], "content part"),
        ([{}], "part"),
    ],
)
def test_other_content_is_refused(content: list[Any], message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(CHATML, {"role": "user", "content": content})


def test_no_messages() -> None:
    with pytest.raises(ChatTemplateError, match="must not be empty"):
        ChatTemplate(CHATML).render([])


def test_a_template_that_is_none() -> None:
    with pytest.raises(ChatTemplateError, match=r"line 2: .*endfor"):
        ChatTemplate("a\n{% endfor %}")
