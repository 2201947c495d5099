//! The example problems and the script that answers them agree with each other and with the scorer.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Write},
    path::PathBuf,
    process::{Command, Stdio},
};

use serde::Deserialize;
use serde_json::Value;

use super::super::{Verdict, grade};

#[derive(Deserialize)]
struct Script {
    tasks: Vec<Task>,
}

#[derive(Deserialize)]
struct Task {
    instance_id: String,
    #[serde(rename = "match")]
    distinctive: String,
    expect: f64,
    /// Whether the answer is what the last cell prints.
    #[serde(default)]
    computed: bool,
    turns: Vec<String>,
}

impl Task {
    /// Returns the tool calls of all turns, as name and arguments.
    fn calls(&self) -> Vec<(String, Value)> {
        let blocks = self.turns.iter().flat_map(|turn| turn.split("<tool_call>\n").skip(1));
        blocks
            .map(|block| {
                let (json, _) = block.split_once("\n</tool_call>").expect("every call is closed");
                let call: Value = serde_json::from_str(json).expect("every call is JSON");
                (call["name"].as_str().unwrap().to_owned(), call["arguments"].clone())
            })
            .collect()
    }

    fn cells(&self) -> Vec<String> {
        let in_cells = self.calls().into_iter().filter(|(name, _)| name == "execute_ipython_cell");
        in_cells.map(|(_, arguments)| arguments["code"].as_str().unwrap().to_owned()).collect()
    }

    fn message(&self) -> String {
        let (name, arguments) = self.calls().pop().expect("every task has calls");
        assert_eq!(name, "finish", "{} ends with another call", self.instance_id);
        arguments["message"].as_str().unwrap().to_owned()
    }
}

struct Problem {
    instance_id: String,
    prompt: String,
    ground_truth: String,
}

fn data(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../examples/data").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|err| panic!("{}: {err}", path.display()))
}

fn script() -> Vec<Task> {
    serde_json::from_str::<Script>(&data("math.script.json")).unwrap().tasks
}

/// Reads a value that is text, or the JSON of something else.
fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn problems() -> Vec<Problem> {
    let text_of_messages = |messages: &Value| -> String {
        messages.as_array().unwrap().iter().map(|message| message["content"].as_str().unwrap()).collect()
    };
    let read = |line: &str| {
        let row: Value = serde_json::from_str(line).unwrap();
        assert_eq!(row["data_source"], "math");
        let prompt = row.get("prompt").or_else(|| row.get("question")).expect("a row has a prompt");
        let messages = match prompt {
            Value::String(json) => serde_json::from_str(json).ok().filter(Value::is_array),
            other => Some(other.clone()),
        };
        let truth = row.get("ground_truth").unwrap_or_else(|| &row["reward_model"]["ground_truth"]);
        Problem {
            instance_id: text(&row["instance_id"]),
            prompt: messages.as_ref().map_or_else(|| text(prompt), text_of_messages),
            ground_truth: text(truth),
        }
    };
    data("math.jsonl").lines().map(read).collect()
}

#[test]
fn every_problem_has_its_task() {
    let (problems, script) = (problems(), script());
    assert!(problems.len() >= 60);
    let ids: BTreeSet<_> = problems.iter().map(|problem| &problem.instance_id).collect();
    assert_eq!(ids.len(), problems.len(), "ids are unique");
    for problem in &problems {
        let matching = script.iter().filter(|task| problem.prompt.contains(&task.distinctive));
        let matching: Vec<_> = matching.map(|task| &task.instance_id).collect();
        assert_eq!(matching, [&problem.instance_id]);
    }
    assert_eq!(problems.len(), script.len());
}

#[test]
fn the_script_earns_what_it_says() {
    let (problems, script) = (problems(), script());
    for (problem, task) in problems.iter().zip(&script) {
        assert_eq!(problem.instance_id, task.instance_id);
        let grade = grade(&task.message(), &problem.ground_truth);
        assert_eq!(grade.reward.to_bits(), task.expect.to_bits(), "{}: {}", task.instance_id, grade.reason);
    }
    let n_wrong = script.iter().filter(|task| task.expect < 0.5).count();
    let share = n_wrong as f64 / script.len() as f64;
    assert!((0.15..=0.25).contains(&share), "{n_wrong} of {} are wrong", script.len());
}

#[test]
fn the_calls_are_those_that_the_math_handler_offers() {
    for task in script() {
        let calls = task.calls();
        let names: Vec<_> = calls.iter().map(|(name, _)| name.as_str()).collect();
        let (last, earlier) = names.split_last().unwrap();
        assert_eq!(*last, "finish");
        assert!(earlier.iter().all(|name| matches!(*name, "execute_ipython_cell" | "think")), "{names:?}");
        assert_eq!(task.computed, !task.cells().is_empty(), "{}", task.instance_id);
    }
}

#[test]
fn the_cells_print_what_the_script_finishes_with() {
    let script: Vec<Task> = script().into_iter().filter(|task| task.computed).collect();
    let cells: BTreeMap<_, _> = script.iter().map(|task| (&task.instance_id, task.cells())).collect();
    let printed = match run_cells(&serde_json::to_vec(&cells).unwrap()) {
        Ok(printed) => printed,
        Err(err) if matches!(err.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
            skipped("no python3 on PATH that this user may run");
            return;
        }
        Err(err) => panic!("python3: {err}"),
    };
    let printed: Value = serde_json::from_slice(&printed).unwrap();
    for task in &script {
        let line = printed[&task.instance_id]["printed"].as_str().unwrap();
        let grade = grade(&task.message(), line);
        assert_eq!(grade.verdict, Verdict::Equal, "{} printed {line:?}: {}", task.instance_id, grade.reason);
    }
    let n_across = script.iter().filter(|task| printed[&task.instance_id]["across"] == true).count();
    assert!(n_across >= 10, "{n_across} tasks use names of earlier cells");
}

/// Runs the cells of all tasks in one interpreter, each task with its own names.
fn run_cells(cells: &[u8]) -> io::Result<Vec<u8>> {
    let mut python = Command::new("python3")
        .args(["-I", "-c", include_str!("run_cells.py")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    python.stdin.take().expect("piped above").write_all(cells)?; // closed here, which python3 waits for
    let ended = python.wait_with_output()?;
    assert!(ended.status.success(), "{}", ended.status);
    Ok(ended.stdout)
}

fn skipped(why: &str) {
    eprintln!("skipped: {why}");
}
