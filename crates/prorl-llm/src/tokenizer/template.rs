//! Chat templates: Jinja as models ship it, rendered as Python's transformers renders it.

use std::fmt::Write as _;

use minijinja::{
    Environment, Error, ErrorKind, Value, escape_formatter,
    syntax::SyntaxConfig,
    value::{Kwargs, ValueKind},
};

/// Bounds the work of one rendering, in the engine's instructions; a template that loops for ever runs out of it.
const FUEL: u64 = 20_000_000;

/// A parsed chat template.
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Parses a template, which finds `tokens` among its variables. The error names the line.
    pub(crate) fn parse(source: &str, tokens: Vec<(&'static str, String)>) -> Result<Self, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|err| describe(&err))?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        // The engine escapes only for names that end like web pages; this one has none of those endings.
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", raise_exception);
        for (name, text) in tokens {
            environment.add_global(name, text);
        }
        environment.add_template_owned(NAME, source.to_owned()).map_err(|err| describe(&err))?;
        Ok(Self { environment })
    }

    /// Renders with the given variables.
    pub(crate) fn render(&self, variables: Value) -> Result<String, String> {
        render(&self.environment, variables).map_err(|err| describe(&err))
    }

    /// Returns the first undefined variable that a rendering writes, where Python writes nothing: a template that wants a
    /// token which the configuration lacks. Fields that messages do not have may be written, as may what a condition left out.
    pub(crate) fn undefined_output(&self, variables: Value) -> Option<String> {
        let mut strict = self.environment.clone();
        strict.set_formatter(|out, state, value| {
            if value.is_undefined() {
                return Err(ErrorKind::UndefinedError.into());
            }
            escape_formatter(out, state, value)
        });
        let err = render(&strict, variables).err()?;
        let source = strict.get_template(NAME).ok()?.source().get(err.range()?)?.to_owned();
        let is_name = source.chars().all(|c| c.is_alphanumeric() || c == '_');
        (err.kind() == ErrorKind::UndefinedError && is_name).then_some(source)
    }
}

fn render(environment: &Environment<'_>, variables: Value) -> Result<String, Error> {
    environment.get_template(NAME)?.render(variables)
}

/// What went wrong and where, on one line.
fn describe(err: &Error) -> String {
    let what = err.detail().map_or_else(|| err.kind().to_string(), |detail| format!("{}: {detail}", err.kind()));
    match err.line() {
        Some(line) => format!("line {line}: {what}"),
        None => what,
    }
}

#[expect(clippy::needless_pass_by_value, reason = "the template engine's calling convention")]
fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, format!("raise_exception: {message}")))
}

/// `json.dumps(value, ensure_ascii=False)` of Python. The engine's own filter writes for web pages and escapes `<` and `&`.
#[expect(clippy::needless_pass_by_value, reason = "the template engine's calling convention")]
fn tojson(value: Value, indent: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<Value>>("indent")?,
    };
    let indent = indent.filter(|indent| !indent.is_none()).map(usize::try_from).transpose()?;
    let style = Style {
        indent,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut text = String::new();
    style.write(&value, 0, &mut text)?;
    Ok(Value::from_safe_string(text))
}

struct Style {
    indent: Option<usize>,
    ensure_ascii: bool,
    sort_keys: bool,
}

impl Style {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None | ValueKind::Undefined => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
            ValueKind::Number => out.push_str(&python_float(f64::try_from(value.clone())?)),
            ValueKind::String => self.write_text(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_all(('[', ']'), &items, depth, out, |style, item, out| style.write(item, depth + 1, out))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.write_all(('{', '}'), &keys, depth, out, |style, key, out| {
                    style.write_text(&key.to_string(), out);
                    out.push_str(": ");
                    style.write(&value.get_item(key)?, depth + 1, out)
                })?;
            }
            kind => {
                return Err(Error::new(ErrorKind::InvalidOperation, format!("{kind} has no JSON form")));
            }
        }
        Ok(())
    }

    fn write_all(
        &self,
        (open, close): (char, char),
        items: &[Value],
        depth: usize,
        out: &mut String,
        write_item: impl Fn(&Self, &Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for (idx, item) in items.iter().enumerate() {
            match (idx, self.indent) {
                (0, None) => {}
                (_, None) => out.push_str(", "),
                (_, Some(_)) if idx > 0 => out.push(','),
                (_, Some(_)) => {}
            }
            self.new_line(depth + 1, out);
            write_item(self, item, out)?;
        }
        if !items.is_empty() {
            self.new_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(width) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', width * depth));
        }
    }

    fn write_text(&self, text: &str, out: &mut String) {
        out.push('"');
        for letter in text.chars() {
            match letter {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                control if control < ' ' => push_escape(u16::try_from(u32::from(control)).unwrap_or(0), out),
                wide if self.ensure_ascii && !wide.is_ascii() => {
                    let mut units = [0_u16; 2];
                    wide.encode_utf16(&mut units).iter().for_each(|unit| push_escape(*unit, out));
                }
                plain => out.push(plain),
            }
        }
        out.push('"');
    }
}

fn push_escape(unit: u16, out: &mut String) {
    write!(out, "\\u{unit:04x}").expect("writing to a string does not fail");
}

/// A float as Python's `repr` prints it: shortest digits, an exponent below 1e-4 and from 1e16.
fn python_float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = value.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::value::Serde;
    use serde_json::json;

    fn render(source: &str, variables: serde_json::Value) -> Result<String, String> {
        ChatTemplate::parse(source, vec![])?.render(Value::from(Serde(variables)))
    }

    #[test]
    fn json_is_written_as_python_writes_it() {
        let value = json!({"k": "é<b>&'\"\\\n\u{1}", "z": [1, 2.5, null, true, {}], "a": [], "f": [1e-7, 1e20, 1e15, 0.1, -0.0]});
        assert_eq!(
            render("{{ v|tojson }}", json!({"v": value})).unwrap(),
            r#"{"k": "é<b>&'\"\\\n\u0001", "z": [1, 2.5, null, true, {}], "a": [], "f": [1e-07, 1e+20, 1000000000000000.0, 0.1, -0.0]}"#
        );
        assert_eq!(
            render("{{ v|tojson(ensure_ascii=true) }}", json!({"v": "é😀"})).unwrap(),
            r#""\u00e9\ud83d\ude00""#
        );
        assert_eq!(
            render("{{ v|tojson(indent=2) }}", json!({"v": {"a": [1, 2], "b": {}}})).unwrap(),
            "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": {}\n}"
        );
    }

    #[test]
    fn errors_name_the_line() {
        assert!(render("a\n{% if %}", json!({})).unwrap_err().contains("line 2"));
        assert!(render("a\n{{ no_such() }}", json!({})).unwrap_err().contains("line 2"));
        let err = render("{{ raise_exception('only one system message') }}", json!({})).unwrap_err();
        assert!(err.contains("only one system message"), "{err}");
    }

    #[test]
    fn tokens_are_variables_and_an_undefined_one_is_named() {
        let parse = |source| ChatTemplate::parse(source, vec![("bos_token", "<s>".to_owned())]).unwrap();
        let variables = || Value::from(Serde(json!({"messages": [{"role": "user"}]})));
        let template = parse("{{ bos_token }}|{{- messages[0].role }}");
        assert_eq!(template.render(variables()).unwrap(), "<s>|user");
        assert_eq!(template.undefined_output(variables()), None);
        for (source, expected) in [
            ("{{ eos_token }}", Some("eos_token")),
            ("x\n{%- for m in messages %}{{- eos_token -}}{% endfor %}", Some("eos_token")),
            ("{% if eos_token is defined %}{{ eos_token }}{% endif %}", None),
            ("{% if eos_token %}{{ eos_token }}{% endif %}", None),
            ("{% for document in documents %}{{ document }}{% endfor %}", None),
            ("{{ eos_token or '' }}", None),
            ("{{ messages[0].name }}", None),
            ("{{ 'x' if false }}", None),
            ("{% set x = 1 %}{{ x }}", None),
        ] {
            assert_eq!(parse(source).undefined_output(variables()).as_deref(), expected, "{source}");
        }
    }

    #[test]
    fn a_template_that_loops_for_ever_runs_out_of_fuel() {
        let source = "{% for a in range(9999) %}{% for b in range(9999) %}{{ b }}{% endfor %}{% endfor %}";
        assert!(render(source, json!({})).unwrap_err().contains("fuel"));
    }
}
