//! The check of arguments: everything that is wrong with them, in one text that a model can act on.

use serde_json::{Map, Value};

use super::Schema;

impl Schema {
    /// Checks arguments: nothing missing, nothing unknown, the right types, within the bounds, one of the listed values. An
    /// optional argument that is null counts as absent.
    ///
    /// Of JSON Schema it knows `type`, `enum`, `properties`, `required`, `additionalProperties: true`, `items`, `minItems`,
    /// `maxItems`, `minimum`, `maximum`, `exclusiveMinimum` and `exclusiveMaximum`, and lets everything else pass.
    ///
    /// # Errors
    /// A sentence for each fault, which names the argument and what it must be.
    pub fn check(&self, arguments: &Map<String, Value>) -> Result<(), String> {
        let mut faults = Faults { of: &self.name, ..Faults::default() };
        faults.object("", &self.parameters, arguments);
        if faults.told.is_empty() {
            return Ok(());
        }
        if faults.wants_usage {
            faults.told.push(self.usage());
        }
        Err(faults.told.join(" "))
    }

    fn usage(&self) -> String {
        let is_required = |name: &str| required(&self.parameters).any(|required| required == name);
        let list: Vec<String> = properties(&self.parameters)
            .map(|(name, _)| if is_required(name) { format!("`{name}`") } else { format!("`{name}` (optional)") })
            .collect();
        match list.len() {
            0 => "It takes no arguments.".to_owned(),
            _ => format!("It takes: {}.", list.join(", ")),
        }
    }
}

fn properties(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    schema["properties"].as_object().into_iter().flatten()
}

fn required(schema: &Value) -> impl Iterator<Item = &str> {
    schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// What is wrong with the arguments of a tool.
#[derive(Default)]
struct Faults<'a> {
    of: &'a str,
    told: Vec<String>,
    /// Whether a list of the arguments helps.
    wants_usage: bool,
}

impl Faults<'_> {
    /// Checks an object. `path` is how its own name begins those of its members: empty, or ends with a dot.
    fn object(&mut self, path: &str, schema: &Value, object: &Map<String, Value>) {
        let is_open = schema["additionalProperties"] == Value::Bool(true) || schema["properties"].is_null();
        let is_known = |name: &str| properties(schema).any(|(known, _)| known == name);
        let missing: Vec<&str> = required(schema).filter(|name| !object.contains_key(*name)).collect();
        for name in &missing {
            self.told.push(format!("Missing argument `{path}{name}` of `{}`.", self.of));
            self.wants_usage |= path.is_empty();
        }
        // What is unknown most likely is what is missing.
        let unknown: Vec<&String> = object.keys().filter(|name| !is_open && !is_known(name)).collect();
        for name in &unknown {
            let absent =
                properties(schema).map(|(known, _)| known.as_str()).filter(|known| !object.contains_key(*known));
            let meant = match (&missing[..], &unknown[..]) {
                ([missing], [_]) => Some(*missing),
                _ => nearest(name, absent),
            };
            let meant = meant.map_or_else(String::new, |meant| format!(" Did you mean `{path}{meant}`?"));
            self.told.push(format!("Unknown argument `{path}{name}` of `{}`.{meant}", self.of));
            self.wants_usage |= path.is_empty();
        }
        for (name, property) in properties(schema) {
            match object.get(name) {
                None => {}
                Some(Value::Null) if !required(schema).any(|required| required == name) => {}
                Some(value) => self.value(&format!("{path}{name}"), property, value),
            }
        }
    }

    fn value(&mut self, name: &str, schema: &Value, value: &Value) {
        if let Err(wanted) = fits(schema, value) {
            // A list or number that was written as a text is the most common of these.
            let inner = value.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
            let is_quoted = inner.is_some_and(|inner| fits(schema, &inner).is_ok());
            let hint = if is_quoted { " Write it without quotes." } else { "" };
            self.told.push(format!("Argument `{name}` of `{}` must be {wanted}, not {}.{hint}", self.of, show(value)));
            return;
        }
        match value {
            Value::Array(items) => {
                for (idx, item) in items.iter().enumerate() {
                    self.value(&format!("{name}[{idx}]"), &schema["items"], item);
                }
            }
            Value::Object(object) => self.object(&format!("{name}."), schema, object),
            _ => {}
        }
    }
}

/// Checks a value by itself, without what is in it. The error says what it must be.
fn fits(schema: &Value, value: &Value) -> Result<(), String> {
    if let Some(allowed) = schema["enum"].as_array() {
        // A model that writes true for "true" means the same.
        let as_text = value.as_bool().map(|truth| Value::from(truth.to_string()));
        if allowed.contains(value) || as_text.is_some_and(|text| allowed.contains(&text)) {
            return Ok(());
        }
        let list: Vec<String> = allowed.iter().map(Value::to_string).collect();
        return Err(format!("one of {}", list.join(", ")));
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one.as_str()],
        Value::Array(several) => several.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    if !types.is_empty() && !types.iter().any(|name| has_type(name, value)) {
        let list: Vec<&str> = types.iter().map(|name| type_in_words(name)).collect();
        return Err(list.join(" or "));
    }
    if let Some(number) = value.as_f64() {
        let what = if types.contains(&"integer") { "a whole number" } else { "a number" };
        let bound = |key: &str| schema[key].as_f64();
        let broken = [
            ("minimum", "of at least", bound("minimum").is_some_and(|least| number < least)),
            ("exclusiveMinimum", "above", bound("exclusiveMinimum").is_some_and(|least| number <= least)),
            ("maximum", "of at most", bound("maximum").is_some_and(|most| number > most)),
            ("exclusiveMaximum", "below", bound("exclusiveMaximum").is_some_and(|most| number >= most)),
        ];
        if let Some((key, words, _)) = broken.iter().find(|(_, _, is_broken)| *is_broken) {
            return Err(format!("{what} {words} {}", schema[*key]));
        }
    }
    if let Some(items) = value.as_array() {
        let n_items = items.len() as u64;
        let (least, most) = (schema["minItems"].as_u64(), schema["maxItems"].as_u64());
        if least.is_some_and(|least| n_items < least) || most.is_some_and(|most| n_items > most) {
            return Err(match (least, most) {
                (Some(least), Some(most)) if least == most => format!("a list of {least} values"),
                (Some(least), Some(most)) => format!("a list of {least} to {most} values"),
                (Some(least), None) => format!("a list of {least} values or more"),
                (None, most) => format!("a list of {} values at most", most.unwrap_or_default()),
            });
        }
    }
    Ok(())
}

fn has_type(name: &str, value: &Value) -> bool {
    match name {
        "string" => value.is_string(),
        "number" => value.is_number(),
        // 3.0 is a whole number too.
        "integer" => value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "boolean" => value.is_boolean(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "null" => value.is_null(),
        _ => true,
    }
}

fn type_in_words(name: &str) -> &str {
    match name {
        "string" => "a string",
        "number" => "a number",
        "integer" => "a whole number",
        "boolean" => "true or false",
        "array" => "a list",
        "object" => "an object",
        other => other,
    }
}

/// Shows a value in a sentence, short.
fn show(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// Returns the name that another was most likely meant to be: one that is an abbreviation of the other, or
/// differs by a letter in three.
pub(crate) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    /// A model may call a name of any length.
    const MOST: usize = 64;
    let name: Vec<char> = name.to_lowercase().chars().take(MOST).collect();
    known
        .filter_map(|candidate| {
            let letters: Vec<char> = candidate.chars().collect();
            let is_part =
                name.len().min(letters.len()) >= 3 && (is_within(&name, &letters) || is_within(&letters, &name));
            let cost = distance(&name, &letters);
            (is_part || cost <= letters.len().max(3) / 3).then_some((cost, candidate))
        })
        .min_by_key(|(cost, _)| *cost)
        .map(|(_, candidate)| candidate)
}

/// Tells whether all letters of one name are in another in order, as those of `cmd` are in `command`.
fn is_within(short: &[char], long: &[char]) -> bool {
    let mut rest = long.iter();
    short.iter().all(|letter| rest.any(|other| other == letter))
}

/// Returns how many letters must be added, removed or replaced to make one name of another.
fn distance(a: &[char], b: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut corner = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let replaced = corner + usize::from(x != y);
            corner = row[j + 1];
            row[j + 1] = replaced.min(corner + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::schema::{execute_bash, execute_ipython_cell, finish, str_replace_editor, think};

    fn check(schema: &Schema, arguments: Value) -> Result<(), String> {
        let Value::Object(arguments) = arguments else { panic!("arguments are an object") };
        schema.check(&arguments)
    }

    #[test]
    fn right_arguments_pass() {
        check(&execute_bash(), json!({"command": "ls"})).unwrap();
        check(&execute_bash(), json!({"command": "", "is_input": "true", "timeout": 1.5})).unwrap();
        check(&execute_bash(), json!({"command": "", "is_input": true, "timeout": null})).unwrap();
        check(&finish(), json!({"message": "done"})).unwrap();
        check(&str_replace_editor(), json!({"command": "view", "path": "/a", "view_range": [1, -1.0]})).unwrap();
    }

    #[test]
    fn a_wrong_argument_is_named_with_what_it_must_be() {
        let text = |schema: &Schema, arguments| check(schema, arguments).unwrap_err();
        let editor = |more: Value| {
            let mut arguments = json!({"command": "view", "path": "/a"});
            arguments.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            text(&str_replace_editor(), arguments)
        };
        assert_eq!(
            text(&execute_bash(), json!({})),
            "Missing argument `command` of `execute_bash`. It takes: `command`, `is_input` (optional), `timeout` (optional)."
        );
        assert_eq!(
            text(&think(), json!({"thought": "x", "plan": 1})),
            "Unknown argument `plan` of `think`. It takes: `thought`."
        );
        assert_eq!(
            text(&execute_ipython_cell(), json!({"code": ["print(1)"]})),
            r#"Argument `code` of `execute_ipython_cell` must be a string, not ["print(1)"]."#
        );
        assert_eq!(
            text(&execute_ipython_cell(), json!({"code": null})),
            "Argument `code` of `execute_ipython_cell` must be a string, not null."
        );
        assert_eq!(
            text(&execute_bash(), json!({"command": "ls", "is_input": "yes"})),
            r#"Argument `is_input` of `execute_bash` must be one of "true", "false", not "yes"."#
        );
        assert_eq!(
            text(&execute_bash(), json!({"command": "ls", "timeout": 0})),
            "Argument `timeout` of `execute_bash` must be a number above 0, not 0."
        );
        assert_eq!(
            text(&execute_bash(), json!({"command": "ls", "timeout": "soon"})),
            r#"Argument `timeout` of `execute_bash` must be a number, not "soon"."#
        );
        let of = "of `str_replace_editor` must be";
        assert_eq!(
            editor(json!({"view_range": [1]})),
            format!("Argument `view_range` {of} a list of 2 values, not [1].")
        );
        assert_eq!(
            editor(json!({"view_range": [1, "end"]})),
            format!(r#"Argument `view_range[1]` {of} a whole number, not "end"."#)
        );
        assert_eq!(
            editor(json!({"view_range": "[1, 2]"})),
            format!(r#"Argument `view_range` {of} a list, not "[1, 2]". Write it without quotes."#)
        );
        assert_eq!(
            editor(json!({"insert_line": -1})),
            format!("Argument `insert_line` {of} a whole number of at least 0, not -1.")
        );
        assert_eq!(
            editor(json!({"insert_line": 1.5})),
            format!("Argument `insert_line` {of} a whole number, not 1.5.")
        );
    }

    #[test]
    fn all_faults_are_told_at_once_with_what_was_meant() {
        let text = |arguments| check(&execute_bash(), arguments).unwrap_err();
        let usage = "It takes: `command`, `is_input` (optional), `timeout` (optional).";
        assert_eq!(
            text(json!({"script": "ls", "timeout": -1})),
            format!(
                "Missing argument `command` of `execute_bash`. Unknown argument `script` of `execute_bash`. Did you mean \
                 `command`? Argument `timeout` of `execute_bash` must be a number above 0, not -1. {usage}"
            )
        );
        let told = text(json!({"cmd": "ls", "time_out": 3, "colour": 1}));
        assert!(told.contains("`cmd` of `execute_bash`. Did you mean `command`? "), "{told}");
        assert!(told.contains("`time_out` of `execute_bash`. Did you mean `timeout`? "), "{told}");
        assert!(told.contains("`colour` of `execute_bash`. It takes"), "{told}");
    }

    #[test]
    fn what_is_inside_of_objects_is_checked_too() {
        let point = json!({"type": "object", "properties": {"x": {"type": ["number", "null"]}}, "required": ["x"]});
        let schema = Schema {
            name: "move".to_owned(),
            description: String::new(),
            parameters: json!({"type": "object", "properties": {
                "to": {"type": "array", "items": point, "minItems": 1}, "how": {"type": "object"},
            }}),
        };
        check(&schema, json!({"to": [{"x": null}, {"x": 1}], "how": {"any": "thing"}})).unwrap();
        assert_eq!(
            check(&schema, json!({"to": [{"x": 1}, {"y": 1}, {"x": "1"}, 5]})).unwrap_err(),
            "Missing argument `to[1].x` of `move`. Unknown argument `to[1].y` of `move`. Did you mean `to[1].x`? \
             Argument `to[2].x` of `move` must be a number or null, not \"1\". Write it without quotes. \
             Argument `to[3]` of `move` must be an object, not 5."
        );
        assert_eq!(
            check(&schema, json!({"to": []})).unwrap_err(),
            "Argument `to` of `move` must be a list of 1 values or more, not []."
        );
    }

    #[test]
    fn the_nearest_name_is_one_that_is_near() {
        let known = || ["command", "path", "view_range", "old_str", "new_str"].into_iter();
        assert_eq!(nearest("Path", known()), Some("path"));
        assert_eq!(nearest("old_string", known()), Some("old_str"));
        assert_eq!(nearest("cmd", known()), Some("command"));
        assert_eq!(nearest("range", known()), Some("view_range"));
        assert_eq!(nearest("old_st", known()), Some("old_str"));
        assert_eq!(nearest("colour", known()), None);
        assert_eq!(nearest(&"x".repeat(100_000), known()), None);
    }
}
