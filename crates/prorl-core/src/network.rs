//! The network that an instance asks for (API section 1.6).

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::{Map, Value, json};

use crate::{Malformed, Stage, request::kind_of};

/// What every form of it looks like.
const EXPECTED: &str = r#"expected "none", "host", {"allow": [hosts]} or {"init": .., "run": .., "eval": ..}"#;

/// What a sandbox may reach, stage by stage. The entries of lists are as the request has them: what they mean is the
/// sandbox's matter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum NetworkChoice {
    /// Its own loopback and nothing else.
    #[default]
    None,
    /// The host's.
    Host,
    /// Its own loopback, and these hosts through a proxy.
    Allow(Vec<String>),
    /// The same, with other hosts in each stage; none where there is no list.
    Phases {
        /// While it is set up.
        init: Option<Vec<String>>,
        /// While the agent works.
        run: Option<Vec<String>>,
        /// While it is scored.
        eval: Option<Vec<String>>,
    },
}

/// What can be reached in one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach<'a> {
    /// Nothing but its own loopback.
    None,
    /// What the host can reach.
    Host,
    /// These hosts.
    Allow(&'a [String]),
}

impl NetworkChoice {
    /// Reads the field `network` of an instance.
    ///
    /// # Errors
    /// Names the part that is wrong, beginning with `network`, and what was expected.
    pub fn parse(value: &Value) -> Result<Self, Malformed> {
        match value {
            Value::Null => Ok(Self::None),
            Value::String(word) => match word.as_str() {
                "none" => Ok(Self::None),
                "host" => Ok(Self::Host),
                "allow" => {
                    let problem = r#""allow" needs a list of hosts; expected {"allow": [hosts]}"#;
                    Err(Malformed::new("network", problem))
                }
                _ => Err(Malformed::new("network", format!("{EXPECTED}, found {word:?}"))),
            },
            Value::Object(fields) if fields.contains_key("allow") => Ok(Self::Allow(allowed("network", fields)?)),
            Value::Object(fields) => phases(fields),
            other => Err(Malformed::new("network", format!("{EXPECTED}, found {}", kind_of(other)))),
        }
    }

    /// Returns what can be reached in a stage.
    pub fn at(&self, stage: Stage) -> Reach<'_> {
        let list = match self {
            Self::None => None,
            Self::Host => return Reach::Host,
            Self::Allow(list) => Some(list),
            Self::Phases { init, run, eval } => match stage {
                Stage::Init => init.as_ref(),
                Stage::Run => run.as_ref(),
                Stage::Eval => eval.as_ref(),
            },
        };
        list.map_or(Reach::None, |list| Reach::Allow(list))
    }

    /// Returns the lists that it has, each with the name of its field.
    pub fn lists(&self) -> Vec<(&'static str, &[String])> {
        match self {
            Self::None | Self::Host => Vec::new(),
            Self::Allow(list) => vec![("network.allow", list)],
            Self::Phases { init, run, eval } => {
                let fields = [("network.init.allow", init), ("network.run.allow", run), ("network.eval.allow", eval)];
                fields.into_iter().filter_map(|(field, list)| Some((field, list.as_deref()?))).collect()
            }
        }
    }
}

impl<'de> Deserialize<'de> for NetworkChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&Value::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl Serialize for NetworkChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let phase = |list: &Option<Vec<String>>| list.as_ref().map_or(json!("none"), |list| json!({"allow": list}));
        let value = match self {
            Self::None => json!("none"),
            Self::Host => json!("host"),
            Self::Allow(list) => json!({"allow": list}),
            Self::Phases { init, run, eval } => json!({"init": phase(init), "run": phase(run), "eval": phase(eval)}),
        };
        value.serialize(serializer)
    }
}

fn phases(fields: &Map<String, Value>) -> Result<NetworkChoice, Malformed> {
    if fields.is_empty() {
        return Err(Malformed::new("network", format!("{EXPECTED}, found an object without fields")));
    }
    if let Some(name) = fields.keys().find(|name| !matches!(name.as_str(), "init" | "run" | "eval")) {
        let problem = "unknown field; expected allow alone, or some of init, run, eval";
        return Err(Malformed::new(format!("network.{name}"), problem));
    }
    let phase = |name: &str| fields.get(name).map_or(Ok(None), |value| phase(&format!("network.{name}"), value));
    Ok(NetworkChoice::Phases { init: phase("init")?, run: phase("run")?, eval: phase("eval")? })
}

fn phase(field: &str, value: &Value) -> Result<Option<Vec<String>>, Malformed> {
    const EXPECTED: &str = r#"expected "none" or {"allow": [hosts]}"#;
    match value {
        Value::Null => Ok(None),
        Value::String(word) => match word.as_str() {
            "none" => Ok(None),
            "host" => {
                let problem =
                    format!("a sandbox is on the host's network for good or never, not for one stage; {EXPECTED}");
                Err(Malformed::new(field, problem))
            }
            "allow" => Err(Malformed::new(field, format!(r#""allow" needs a list of hosts; {EXPECTED}"#))),
            _ => Err(Malformed::new(field, format!("{EXPECTED}, found {word:?}"))),
        },
        Value::Object(fields) => allowed(field, fields).map(Some),
        other => Err(Malformed::new(field, format!("{EXPECTED}, found {}", kind_of(other)))),
    }
}

/// Reads the object that holds a list and nothing else.
fn allowed(field: &str, fields: &Map<String, Value>) -> Result<Vec<String>, Malformed> {
    if let Some(name) = fields.keys().find(|name| *name != "allow") {
        return Err(Malformed::new(format!("{field}.{name}"), "unknown field; expected allow alone"));
    }
    let field = format!("{field}.allow");
    let list = match fields.get("allow") {
        Some(Value::Array(list)) if list.is_empty() => {
            let problem = r#"expected one host or more, found an empty list; "none" allows nothing"#;
            return Err(Malformed::new(field, problem));
        }
        Some(Value::Array(list)) => list,
        Some(other) => {
            return Err(Malformed::new(field, format!("expected a list of hosts, found {}", kind_of(other))));
        }
        None => return Err(Malformed::new(field, "expected a list of hosts, found nothing")),
    };
    let entries = list.iter().enumerate().map(|(entry_idx, entry)| match entry {
        Value::String(entry) => Ok(entry.clone()),
        other => {
            let problem = format!("expected a host as text, found {}", kind_of(other));
            Err(Malformed::new(format!("{field}[{entry_idx}]"), problem))
        }
    });
    entries.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[&str]) -> Vec<String> {
        entries.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn every_form_says_what_each_stage_reaches() {
        let (hosts, more) = (list(&["a.example"]), list(&["b.example", "*.c.example:8443"]));
        for (value, [init, run, eval]) in [
            (json!("none"), [Reach::None; 3]),
            (json!("host"), [Reach::Host; 3]),
            (json!(null), [Reach::None; 3]),
            (json!({"allow": ["a.example"]}), [Reach::Allow(&hosts); 3]),
            (json!({"init": {"allow": ["a.example"]}}), [Reach::Allow(&hosts), Reach::None, Reach::None]),
            (
                json!({"init": {"allow": ["a.example"]}, "run": "none", "eval": {"allow": ["b.example", "*.c.example:8443"]}}),
                [Reach::Allow(&hosts), Reach::None, Reach::Allow(&more)],
            ),
            (json!({"run": null}), [Reach::None; 3]),
        ] {
            let choice = NetworkChoice::parse(&value).unwrap();
            assert_eq!(
                [Stage::Init, Stage::Run, Stage::Eval].map(|stage| choice.at(stage)),
                [init, run, eval],
                "{value}"
            );
            assert_eq!(serde_json::from_value::<NetworkChoice>(value).unwrap(), choice);
            assert_eq!(serde_json::from_value::<NetworkChoice>(json!(choice)).unwrap(), choice);
        }
        let fields = NetworkChoice::parse(&json!({"eval": {"allow": ["x"]}, "init": {"allow": ["y"]}})).unwrap();
        assert_eq!(
            fields.lists(),
            [("network.init.allow", &list(&["y"])[..]), ("network.eval.allow", &list(&["x"])[..])]
        );
    }

    #[test]
    fn other_forms_are_named_with_what_was_expected() {
        for (value, field, problem) in [
            (json!("allow"), "network", r#""allow" needs a list of hosts; expected {"allow": [hosts]}"#),
            (json!("all"), "network", r#"found "all""#),
            (json!(""), "network", r#"found """#),
            (json!(true), "network", "found a boolean"),
            (json!(["a.example"]), "network", "found a list"),
            (json!({}), "network", "found an object without fields"),
            (json!({"allow": []}), "network.allow", r#"found an empty list; "none" allows nothing"#),
            (json!({"allow": "a.example"}), "network.allow", "expected a list of hosts, found a string"),
            (json!({"allow": null}), "network.allow", "found null"),
            (json!({"allow": ["a", 5]}), "network.allow[1]", "expected a host as text, found a number"),
            (json!({"allow": ["a"], "run": "none"}), "network.run", "unknown field; expected allow alone"),
            (json!({"allow": ["a"], "deny": ["b"]}), "network.deny", "unknown field"),
            (json!({"runn": "none"}), "network.runn", "some of init, run, eval"),
            (json!({"run": "host"}), "network.run", "not for one stage"),
            (json!({"run": "allow"}), "network.run", "needs a list of hosts"),
            (json!({"run": "any"}), "network.run", r#"found "any""#),
            (json!({"run": ["a"]}), "network.run", "found a list"),
            (json!({"eval": {}}), "network.eval.allow", "found nothing"),
            (json!({"eval": {"allow": []}}), "network.eval.allow", "found an empty list"),
            (json!({"init": {"allow": [{}]}}), "network.init.allow[0]", "found an object"),
            (json!({"init": {"init": "none"}}), "network.init.init", "unknown field"),
        ] {
            let error = NetworkChoice::parse(&value).unwrap_err();
            assert_eq!(error.field, field, "{value}: {error}");
            assert!(error.problem.contains(problem), "{value}: {error}");
        }
    }
}
