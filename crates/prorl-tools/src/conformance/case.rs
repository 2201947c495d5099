//! A case: what is asked for, and what must come of it.

use std::{collections::BTreeSet, time::Duration};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// How long a call may take when its step says nothing.
const LIMIT: Duration = Duration::from_mins(1);

/// The folder that a case works in, wherever a text of a case has this.
const FOLDER: &str = "@dir@";
/// The number of the repetition, from 0.
const REPETITION: &str = "@n@";
/// As many letters as the step's `pad` says.
const PADDING: &str = "@x@";

/// What the cases of a file are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Suite {
    /// A shell.
    Bash,
    /// A Python interpreter.
    Ipython,
    /// An editor of files.
    Editor,
}

impl Suite {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Bash, Self::Ipython, Self::Editor];

    /// Returns its name in reports and in the protocol of adapters.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bash => "bash",
            Self::Ipython => "ipython",
            Self::Editor => "editor",
        }
    }

    /// Returns its cases.
    ///
    /// # Panics
    /// Never: a test reads them all.
    pub fn cases(self) -> Vec<Case> {
        let text = match self {
            Self::Bash => include_str!("../../conformance/bash.toml"),
            Self::Ipython => include_str!("../../conformance/ipython.toml"),
            Self::Editor => include_str!("../../conformance/editor.toml"),
        };
        Case::read(text).expect("the cases of this crate are right")
    }
}

/// A text holds no cases.
#[derive(Debug, thiserror::Error)]
#[error("not a list of cases")]
pub struct InvalidCase(#[from] toml::de::Error);

/// What an implementation must be able to do for a case to say anything about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Need {
    /// Typing into a command that runs.
    Input,
    /// Answering when a command has been silent for a while.
    Silence,
    /// Results that are more than text.
    Rich,
}

/// One promise.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Its name, unique in its suite.
    pub name: String,
    /// What is promised.
    pub about: String,
    /// What it takes.
    #[serde(default)]
    pub needs: BTreeSet<Need>,
    /// Files that are there before.
    #[serde(default)]
    pub files: Vec<File>,
    /// Calls, one after the other in one session.
    pub steps: Vec<Step>,
}

impl Case {
    /// Reads the cases of a file in TOML.
    ///
    /// # Errors
    /// When the text is not TOML, or a case has what no case has.
    pub fn read(text: &str) -> Result<Vec<Self>, InvalidCase> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Cases {
            case: Vec<Case>,
        }
        Ok(toml::from_str::<Cases>(text)?.case)
    }
}

/// A call, and what must come of it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "RawStep")]
pub struct Step {
    /// What is called, with marks for what differs from time to time; see [`call`](Self::call).
    call: Call,
    /// What must come of it, with the same marks.
    expect: Expect,
    code: Option<Code>,
    /// How often, one after the other.
    pub times: u32,
    pad: usize,
}

impl Step {
    /// Returns what is called at a repetition, by a session that works in `folder`.
    pub fn call(&self, repetition: u32, folder: &str) -> Call {
        let fill = |text: &str| self.fill(text, repetition, folder);
        let what = match &self.call.what {
            What::Command(text) => What::Command(fill(text)),
            What::Input(text) => What::Input(fill(text)),
            What::Cell(text) => What::Cell(fill(text)),
            What::Edit(arguments) => {
                let filled = |value: &Value| value.as_str().map_or_else(|| value.clone(), |text| fill(text).into());
                What::Edit(arguments.iter().map(|(name, value)| (name.clone(), filled(value))).collect())
            }
        };
        Call { what, ..self.call }
    }

    /// Returns what must come of that.
    pub fn expect(&self, repetition: u32, folder: &str) -> Expect {
        let fill = |text: &String| self.fill(text, repetition, folder);
        let all = |texts: &[String]| texts.iter().map(fill).collect();
        let expect = &self.expect;
        let code = match &self.code {
            Some(Code::Number(code)) => Some(*code),
            Some(Code::Text(_)) => i32::try_from(repetition).ok(),
            None => None,
        };
        Expect {
            output: expect.output.as_ref().map(fill),
            has: all(&expect.has),
            lacks: all(&expect.lacks),
            starts: expect.starts.as_ref().map(fill),
            ends: expect.ends.as_ref().map(fill),
            cwd: expect.cwd.as_ref().map(fill),
            code,
            ..expect.clone()
        }
    }

    fn fill(&self, text: &str, repetition: u32, folder: &str) -> String {
        let text = text.replace(FOLDER, folder).replace(REPETITION, &repetition.to_string());
        if self.pad == 0 { text } else { text.replace(PADDING, &"x".repeat(self.pad)) }
    }
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// What is called.
    pub what: What,
    /// The call's own limit.
    pub limit: Duration,
    /// Return after this long without output, and leave the command running.
    pub silence: Option<Duration>,
}

/// What is called.
#[derive(Clone, Debug, PartialEq)]
pub enum What {
    /// A command of bash.
    Command(String),
    /// What is typed into the one that runs: a line of text, `C-c` or `C-d`, or nothing to wait.
    Input(String),
    /// A Python cell.
    Cell(String),
    /// Arguments of the editor: `command`, `path` and so on.
    Edit(Map<String, Value>),
}

/// How a call came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It was done.
    Done,
    /// The command runs on.
    Running,
    /// The limit passed, and it was ended.
    Limit,
    /// The shell or interpreter is gone; there is a new one, or one comes with the next call.
    Reset,
    /// Nothing was done, and a text says why.
    Refused,
    /// The implementation has no such call.
    Unsupported,
}

/// What must come of a call. What is absent is not looked at.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Expect {
    /// All that is printed.
    pub output: Option<String>,
    /// What is printed among other things, in this order.
    pub has: Vec<String>,
    /// What is not printed.
    pub lacks: Vec<String>,
    /// How the output begins.
    pub starts: Option<String>,
    /// How the output ends.
    pub ends: Option<String>,
    /// Bytes that were printed, of which the output may have less.
    pub bytes: Option<u64>,
    /// Bytes that the output has at most.
    pub at_most: Option<usize>,
    /// The exit code.
    pub code: Option<i32>,
    /// One of these; [`State::Done`] where the case does not say.
    pub states: Vec<State>,
    /// Whether it is said to wait for input.
    pub waits: Option<bool>,
    /// The shell's folder.
    pub cwd: Option<String>,
    /// Types of the parts that are more than text, in this order.
    pub parts: Option<Vec<String>>,
    /// How long it may take.
    pub within: Option<Duration>,
    /// Files afterwards.
    pub leaves: Vec<File>,
}

/// A file in a session's folder, as a case makes it or must find it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "RawFile")]
pub struct File {
    /// Its path from that folder.
    pub path: String,
    /// What it is.
    pub content: Content,
    /// Its permissions.
    pub mode: Option<u32>,
}

/// What a path is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// A file with these bytes.
    Bytes(Vec<u8>),
    /// A symbolic link.
    Link(String),
    /// A folder.
    Folder,
    /// Nothing.
    Absent,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
enum Code {
    Number(i32),
    /// The mark of the repetition.
    Text(String),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(State),
    Many(Vec<State>),
}

/// A step as it is written, with everything on one level.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawStep {
    run: Option<String>,
    input: Option<String>,
    cell: Option<String>,
    edit: Option<Map<String, Value>>,
    timeout: Option<f64>,
    silence: Option<f64>,
    within: Option<f64>,
    times: Option<u32>,
    pad: Option<usize>,
    output: Option<String>,
    #[serde(default)]
    has: Vec<String>,
    #[serde(default)]
    lacks: Vec<String>,
    starts: Option<String>,
    ends: Option<String>,
    bytes: Option<u64>,
    at_most: Option<usize>,
    code: Option<Code>,
    state: Option<OneOrMany>,
    waits: Option<bool>,
    cwd: Option<String>,
    parts: Option<Vec<String>>,
    #[serde(default)]
    leaves: Vec<File>,
}

impl TryFrom<RawStep> for Step {
    type Error = String;

    fn try_from(raw: RawStep) -> Result<Self, String> {
        let secs = |secs: f64| Duration::try_from_secs_f64(secs).map_err(|err| err.to_string());
        let what = match (raw.run, raw.input, raw.cell, raw.edit) {
            (Some(text), None, None, None) => What::Command(text),
            (None, Some(text), None, None) => What::Input(text),
            (None, None, Some(text), None) => What::Cell(text),
            (None, None, None, Some(arguments)) => What::Edit(arguments),
            _ => return Err("a step has one of `run`, `input`, `cell` and `edit`".to_owned()),
        };
        if let Some(Code::Text(text)) = &raw.code
            && text != REPETITION
        {
            return Err(format!("`code` is a number or {REPETITION}"));
        }
        let states = match raw.state {
            None => vec![State::Done],
            Some(OneOrMany::One(state)) => vec![state],
            Some(OneOrMany::Many(states)) => states,
        };
        let call = Call {
            what,
            limit: raw.timeout.map(secs).transpose()?.unwrap_or(LIMIT),
            silence: raw.silence.map(secs).transpose()?,
        };
        let expect = Expect {
            output: raw.output,
            has: raw.has,
            lacks: raw.lacks,
            starts: raw.starts,
            ends: raw.ends,
            bytes: raw.bytes,
            at_most: raw.at_most,
            code: None,
            states,
            waits: raw.waits,
            cwd: raw.cwd,
            parts: raw.parts,
            within: raw.within.map(secs).transpose()?,
            leaves: raw.leaves,
        };
        Ok(Self { call, expect, code: raw.code, times: raw.times.unwrap_or(1), pad: raw.pad.unwrap_or(0) })
    }
}

/// A file as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFile {
    path: String,
    text: Option<String>,
    /// Bytes as pairs of hexadecimal digits.
    hex: Option<String>,
    /// That many bytes, in lines.
    fill: Option<usize>,
    link: Option<String>,
    #[serde(default)]
    folder: bool,
    #[serde(default)]
    absent: bool,
    mode: Option<u32>,
}

impl TryFrom<RawFile> for File {
    type Error = String;

    fn try_from(raw: RawFile) -> Result<Self, String> {
        let content = match (raw.text, raw.hex, raw.fill, raw.link, raw.folder, raw.absent) {
            (Some(text), None, None, None, false, false) => Content::Bytes(text.into_bytes()),
            (None, Some(digits), None, None, false, false) => {
                let digits: Vec<u32> = digits.chars().filter_map(|digit| digit.to_digit(16)).collect();
                Content::Bytes(
                    digits
                        .chunks(2)
                        .map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit.to_le_bytes()[0]))
                        .collect(),
                )
            }
            (None, None, Some(n_bytes), None, false, false) => {
                Content::Bytes(b"0123456789abcde\n".iter().copied().cycle().take(n_bytes).collect())
            }
            (None, None, None, Some(target), false, false) => Content::Link(target),
            (None, None, None, None, true, false) => Content::Folder,
            (None, None, None, None, false, true) => Content::Absent,
            _ => return Err(format!("{} is one of `text`, `hex`, `fill`, `link`, `folder` and `absent`", raw.path)),
        };
        Ok(Self { path: raw.path, content, mode: raw.mode })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_read_and_have_names_of_their_own() {
        for (suite, at_least) in [(Suite::Bash, 80), (Suite::Ipython, 20), (Suite::Editor, 20)] {
            let cases = suite.cases();
            let names: BTreeSet<_> = cases.iter().map(|case| case.name.as_str()).collect();
            assert_eq!(names.len(), cases.len(), "{suite:?}");
            assert!(cases.len() >= at_least, "{suite:?}: {}", cases.len());
            for case in &cases {
                assert!(!case.about.is_empty() && !case.steps.is_empty(), "{}", case.name);
                assert!(case.about.ends_with('.') && !case.about.contains('|'), "{}", case.name);
                let is_word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
                assert!(case.name.bytes().all(is_word), "{}", case.name);
            }
        }
        assert!(Suite::Ipython.cases().len() + Suite::Editor.cases().len() >= 40);
    }

    #[test]
    fn what_no_case_has_is_an_error() {
        for text in [
            "",
            "[[case]]\nname = 'a'\nabout = 'b.'\nsteps = [{ run = 'x', input = 'y' }]",
            "[[case]]\nname = 'a'\nabout = 'b.'\nsteps = [{ run = 'x', outptu = 'y' }]",
            "[[case]]\nname = 'a'\nabout = 'b.'\nsteps = [{ run = 'x', code = 'y' }]",
            "[[case]]\nname = 'a'\nabout = 'b.'\nsteps = []\nfiles = [{ path = 'x' }]",
        ] {
            assert!(Case::read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn marks_are_filled_in() {
        let text = "[[case]]\nname = 'a'\nabout = 'b.'\nsteps = [{ run = 'cat @dir@/@n@ @x@', output = '@n@', code = '@n@', pad = 3 }]";
        let case = Case::read(text).unwrap().remove(0);
        let step = &case.steps[0];
        assert_eq!(step.call(7, "/d").what, What::Command("cat /d/7 xxx".to_owned()));
        let expect = step.expect(7, "/d");
        assert_eq!((expect.output.as_deref(), expect.code), (Some("7"), Some(7)));
    }
}
