//! Tools by name, as an agent loop calls them.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use prorl_core::{Content, Part};
use prorl_tools::{
    host::{TextForm, Tool, ToolContext, ToolError, ToolResult, Toolbox},
    schema::Schema,
};
use serde_json::{Map, Value, json};

use crate::guest::{Guest, LONG};

fn object(value: Value) -> Map<String, Value> {
    let Value::Object(object) = value else { panic!("an object") };
    object
}

#[test]
fn tools_are_chosen_by_their_own_and_short_names_in_order() {
    let toolbox = Toolbox::from_names(["finish", "ipython", "think", "bash", "execute_bash"]).unwrap();
    assert_eq!(toolbox.names().collect::<Vec<_>>(), ["finish", "execute_ipython_cell", "think", "execute_bash"]);
    assert_eq!(toolbox.schemas()[1]["function"]["name"], "execute_ipython_cell");
    assert_eq!(
        Toolbox::from_names(["think", "browser"]).unwrap_err().to_string(),
        "no tool is named \"browser\"; known: bash, execute_bash, ipython, \
         execute_ipython_cell, editor, str_replace_editor, think, finish"
    );
}

#[tokio::test]
async fn what_a_model_gets_wrong_is_a_result_that_it_can_act_on() {
    let guest = Guest::start().await;
    let toolbox = Toolbox::from_names(["ipython", "think", "finish"]).unwrap();
    let context = ToolContext::new(guest.client(), LONG);
    let call = async |name: &str, arguments: Value| toolbox.call(&context, name, &object(arguments)).await.unwrap();

    let result = call("python", json!({"code": "1"})).await;
    assert!(result.is_error);
    assert_eq!(
        result.content.text(),
        "There is no tool `python`. Did you mean `execute_ipython_cell`? The tools are: `execute_ipython_cell`, `think`, `finish`."
    );
    let result = call("think", json!({})).await;
    assert!(result.is_error && result.content.text().starts_with("Missing argument `thought` of `think`."));

    let result = call("think", json!({"thought": "hm"})).await;
    assert_eq!(result, ToolResult::text("Your thought has been logged."));
    let result = call("finish", json!({"message": "42"})).await;
    assert_eq!((result.finish.as_deref(), result.is_error), (Some("42"), false));
    let result = call("execute_ipython_cell", json!({"code": "6 * 7"})).await;
    assert_eq!((result.content.text().as_str(), result.is_error), ("42\n", false));
}

#[tokio::test]
async fn a_bash_result_reads_as_models_know_it() {
    let guest = Guest::start().await;
    let toolbox = Toolbox::from_names(["bash"]).unwrap();
    let context = ToolContext { silence: Some(Duration::from_millis(300)), ..ToolContext::new(guest.client(), LONG) };
    let call = async |arguments: Value| toolbox.call(&context, "execute_bash", &object(arguments)).await.unwrap();
    let text = |result: &ToolResult| result.content.text();

    let result = call(json!({"command": "cd /usr; printf abc"})).await;
    assert_eq!(text(&result), "abc\n[The command completed with exit code 0.]\n[Current working directory: /usr]");
    let result = call(json!({"command": "sleep 100"})).await;
    assert!(text(&result).contains("It is still running.") && !result.is_error, "{result:?}");
    let result = call(json!({"command": "C-c", "is_input": "true"})).await;
    assert!(text(&result).starts_with("[The command completed with exit code 130.]"), "{result:?}");
    let result = call(json!({"command": "echo partial; sleep 100", "timeout": 0.5})).await;
    assert!(result.is_error);
    assert_eq!(
        text(&result),
        "partial\n[The command timed out after 0.5 seconds. It was interrupted.]\n[Current working directory: /usr]"
    );
}

#[tokio::test]
async fn a_model_reads_what_a_terminal_shows_in_the_end() {
    let guest = Guest::start().await;
    let toolbox = Toolbox::from_names(["bash", "ipython"]).unwrap();
    let clean = ToolContext::new(guest.client(), LONG);
    let raw = ToolContext { text: TextForm::Raw, ..clean };
    let call = async |context: &ToolContext<'_>, name: &str, argument: &str, text: &str| {
        toolbox.call(context, name, &object(json!({argument: text}))).await.unwrap().content.text()
    };
    let bar = r"for n in 1 50 100; do printf '\r\033[32m%3d%%\033[0m' $n; done; printf '\n\007\000end\n'";
    let end = "[The command completed with exit code 0.]";
    let text = call(&clean, "execute_bash", "command", bar).await;
    assert!(text.starts_with(&format!("100%\n\u{fffd}end\n{end}")), "{text:?}");
    let text = call(&raw, "execute_bash", "command", bar).await;
    assert!(text.starts_with("\r\x1b[32m  1%\x1b[0m\r") && text.contains("\x07\0end\n"), "{text:?}");

    let bar = "for n in (1, 50, 100): print(f'\\r\\x1b[1m{n}%', end='')";
    assert_eq!(call(&clean, "execute_ipython_cell", "code", bar).await, "100%");
    let text = call(&raw, "execute_ipython_cell", "code", "1 / 0").await;
    assert!(text.contains("ZeroDivisionError"), "{text}");

    // The screen of a pager is no text, which is said.
    let pager = r"printf '\033[?1049h\033[Hpage\033[24;1H:'; printf '\033[?1049l'";
    let text = call(&clean, "execute_bash", "command", pager).await;
    assert!(text.contains("[A full-screen program had the terminal, and"), "{text}");
}

#[tokio::test]
async fn a_limit_that_is_the_tasks_own_is_told_apart() {
    let guest = Guest::start().await;
    let toolbox = Toolbox::from_names(["bash"]).unwrap();
    let context = ToolContext::new(guest.client(), Duration::from_millis(500));
    for (secs, all) in [(1e300, true), (100.0, true), (0.3, false)] {
        let arguments = object(json!({"command": "sleep 100", "timeout": secs}));
        let text = toolbox.call(&context, "execute_bash", &arguments).await.unwrap().content.text();
        assert_eq!(
            text.contains("timed out after 0.5 seconds, which was all the time that the task had left. It"),
            all
        );
        assert_eq!(text.contains("timed out after 0.3 seconds. It"), !all, "{text}");
    }
}

#[tokio::test]
async fn a_command_that_no_frame_holds_is_refused() {
    let guest = Guest::start().await;
    for (tool, argument, what) in [("execute_bash", "command", "command"), ("execute_ipython_cell", "code", "cell")] {
        let result = guest.tool(tool, &[(argument, &"#".repeat(5 << 20))], LONG).await;
        assert!(result.is_error);
        let text = result.content.text();
        assert!(text.starts_with(&format!("The {what} is too long: it has about 5242")), "{text}");
        assert!(text.contains("at most 4 MiB can be sent. Nothing was done."), "{text}");
    }
}

#[test]
fn a_note_is_a_line_of_its_own() {
    let text = |text: &str| Part::Text { text: text.to_owned() };
    let image = Part::Image { mime: "image/png".to_owned(), data: String::new() };
    let noted = |parts: &[Part]| {
        let mut result = ToolResult::new(Content::Parts(parts.to_vec()));
        result.note("note");
        result.content
    };
    assert_eq!(noted(std::slice::from_ref(&image)), Content::Parts(vec![image.clone(), text("[note]")]));
    assert_eq!(noted(&[image.clone(), text("a")]), Content::Parts(vec![image, text("a\n[note]")]));
}

struct Upper;

#[async_trait]
impl Tool for Upper {
    fn schema(&self) -> Schema {
        Schema {
            name: "upper".to_owned(),
            description: "Shouts.".to_owned(),
            parameters: json!({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}),
        }
    }

    async fn call(&self, _context: &ToolContext<'_>, arguments: &Map<String, Value>) -> Result<ToolResult, ToolError> {
        Ok(ToolResult::text(arguments["text"].as_str().unwrap_or_default().to_uppercase()))
    }
}

#[tokio::test]
async fn another_crate_adds_a_tool() {
    let guest = Guest::start().await;
    let toolbox = Toolbox::from_names(["think"]).unwrap().with(Arc::new(Upper));
    let context = ToolContext::new(guest.client(), LONG);
    let result = toolbox.call(&context, "upper", &object(json!({"text": "hey"}))).await.unwrap();
    assert_eq!(result, ToolResult::text("HEY"));
    let result = toolbox.call(&context, "upper", &object(json!({"text": 1}))).await.unwrap();
    assert!(result.is_error);
}

#[tokio::test]
async fn a_dead_sandbox_is_an_error_and_no_result() {
    let mut guest = Guest::bare(&[]);
    guest.kill();
    let toolbox = Toolbox::from_names(["bash"]).unwrap();
    let context = ToolContext::new(guest.client(), LONG);
    let failed = toolbox.call(&context, "execute_bash", &object(json!({"command": "true"}))).await.unwrap_err();
    assert!(failed.is_infrastructure(), "{failed}");
}

#[tokio::test]
async fn both_languages_start_in_the_same_folder() {
    let guest = Guest::start().await;
    let cell = guest.cell("import os; print(os.getcwd())").await;
    assert_eq!(guest.run("pwd; echo shared > note").await, (cell, 0));
    assert_eq!(guest.cell("open('note').read()").await, "'shared\\n'\n");
    guest.cell("open('answer', 'w').write('back')").await;
    assert_eq!(guest.run("cat answer").await.0, "back");
    let folder = tempfile::tempdir().unwrap();
    let guest = Guest::bare_in(folder.path(), &[]);
    let real = std::fs::canonicalize(folder.path()).unwrap();
    assert_eq!(guest.run("pwd").await.0.trim_end(), real.to_str().unwrap());
}

#[tokio::test]
async fn a_large_output_does_not_fill_the_conversation() {
    let guest = Guest::start().await;
    for (tool, argument, text) in [
        ("execute_bash", "command", "printf 'begin'; head -c 100000 /dev/zero | tr '\\0' x; echo end"),
        ("execute_ipython_cell", "code", "print('begin' + 'x' * 100_000 + 'end')"),
    ] {
        let read = guest.tool(tool, &[(argument, text)], LONG).await.content.text();
        assert!(read.starts_with("beginx") && read.contains("xend\n") && read.contains(" of 100009 bytes left out "));
        assert!(read.chars().count() <= 30_000, "{tool}: {} characters", read.chars().count());
    }
}
