//! Definition files as templates: those that are shipped, and how any is rendered.

use std::collections::{BTreeSet, HashSet};

use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior, Value, syntax::SyntaxConfig, value::Serde,
};
use serde_json::Map;

use crate::images::ImageError;

/// How much a template may do. The largest that is shipped needs a hundredth of it.
const FUEL: u64 = 1_000_000;

/// A definition file that is shipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Template {
    /// What it is asked for by.
    pub name: &'static str,
    /// What it makes, in one line.
    pub about: &'static str,
    /// The template itself. Its comment says which variables it takes, and what they are when nobody says otherwise.
    pub text: &'static str,
}

/// The templates that are shipped.
pub(super) const TEMPLATES: &[Template] = &[
    Template {
        name: "minimal",
        about: "a static busybox under all of its names; needs no network and no base",
        text: include_str!("../../../templates/minimal.def.j2"),
    },
    Template {
        name: "python",
        about: "Python with IPython and pip, on Debian or a relative of it",
        text: include_str!("../../../templates/python.def.j2"),
    },
    Template {
        name: "swe",
        about: "Python with IPython and pip, git, compilers, patch and the usual tools",
        text: include_str!("../../../templates/swe.def.j2"),
    },
    Template {
        name: "qemu",
        about: "QEMU for x86-64 with UEFI firmware and tools for disk images",
        text: include_str!("../../../templates/qemu.def.j2"),
    },
];

/// What several templates include.
const PARTS: [(&str, &str); 2] = [
    ("bootstrap", include_str!("../../../templates/bootstrap.j2")),
    ("cleanup", include_str!("../../../templates/cleanup.j2")),
];

/// Returns the shipped template of a name.
pub(super) fn shipped(name: &str) -> Result<&'static Template, ImageError> {
    TEMPLATES.iter().find(|template| template.name == name).ok_or_else(|| {
        let names: Vec<_> = TEMPLATES.iter().map(|template| template.name).collect();
        wrong(&format!("template {name:?}"), format!("is not shipped; there are {}", names.join(", ")))
    })
}

/// Renders a template. A variable that it needs and is not given is refused, and one that is given and that it does not know.
pub(super) fn render(name: &str, text: &str, variables: &Map<String, serde_json::Value>) -> Result<String, ImageError> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(true).build();
    environment.set_syntax(syntax.map_err(|error| explain(name, &error))?);
    environment.set_fuel(Some(FUEL));
    environment.add_filter("shell", quoted);
    for (part, text) in PARTS {
        environment.add_template(part, text).map_err(|error| explain(part, &error))?;
    }
    let template = environment.template_from_named_str(name, text).map_err(|error| explain(name, &error))?;
    let known = taken(text, template.undeclared_variables(false));
    if let Some(unknown) = variables.keys().find(|variable| !known.contains(*variable)) {
        let takes = if known.is_empty() {
            "takes none".to_owned()
        } else {
            format!("takes {}", known.into_iter().collect::<Vec<_>>().join(", "))
        };
        return Err(wrong(name, format!("knows no variable {unknown:?}; it {takes}")));
    }
    template.render(Serde(variables)).map_err(|error| explain(name, &error))
}

/// Returns the variables that a template takes. The engine does not count those that are given their own value, or another
/// where they have none: `{% set x = x | default(1) %}`.
fn taken(text: &str, asked: HashSet<String>) -> BTreeSet<String> {
    let is_of_name = |char: char| char.is_alphanumeric() || char == '_';
    let defaults = text.split("{%").filter_map(|tag| {
        let (name, value) = tag.trim_start_matches(['-', '+']).trim_start().strip_prefix("set ")?.split_once('=')?;
        let own = value.trim_start().split(|char| !is_of_name(char)).next()?;
        (name.trim() == own).then(|| own.to_owned())
    });
    let mut taken: BTreeSet<_> = asked.into_iter().chain(defaults).collect();
    taken.remove("range"); // the engine's own
    taken
}

/// Makes one word of a shell out of a value.
fn quoted(value: &Value) -> String {
    format!("'{}'", value.to_string().replace('\'', r"'\''"))
}

/// Says what is wrong where: the line and, of a variable that is not there, its name.
fn explain(template: &str, error: &Error) -> ImageError {
    let name = error.name().unwrap_or(template);
    let line = error.line().map(|line| format!(" line {line}")).unwrap_or_default();
    let code = error.template_source().zip(error.range()).and_then(|(source, range)| source.get(range));
    let problem = if let (ErrorKind::UndefinedError, Some(code)) = (error.kind(), code) {
        format!("needs the variable {:?}, which is not given", code.trim())
    } else {
        let detail = error.detail().map(|detail| format!(": {detail}")).unwrap_or_default();
        format!("cannot be rendered: {}{detail}", error.kind())
    };
    wrong(&format!("{name}{line}"), problem)
}

fn wrong(template: &str, problem: String) -> ImageError {
    ImageError::Source { image: template.to_owned(), problem }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn variables(value: &serde_json::Value) -> Map<String, serde_json::Value> {
        value.as_object().unwrap().clone()
    }

    fn refusal(text: &str, given: &serde_json::Value) -> String {
        render("own.def.j2", text, &variables(given)).unwrap_err().to_string()
    }

    #[test]
    fn a_variable_that_is_missing_is_named_with_its_line() {
        let text = "Bootstrap: localimage\nFrom: {{ base }}\n";
        assert_eq!(render("a", text, &variables(&json!({"base": "/b"}))).unwrap(), "Bootstrap: localimage\nFrom: /b\n");
        let said = refusal(text, &json!({}));
        assert!(said.contains("own.def.j2 line 2") && said.contains("\"base\""), "{said}");
        let said = refusal("{% if not there.it %}{% endif %}", &json!({"there": 1}));
        assert!(said.contains("line 1") && said.contains("there.it"), "{said}");
        let said = refusal("one\n{% for x in list %}{{ x }}{% endfor %}", &json!({}));
        assert!(said.contains("line 2") && said.contains("list"), "{said}");
    }

    #[test]
    fn a_variable_that_nobody_knows_is_refused_with_those_that_are_known() {
        let said = refusal("{{ python }}{% set pip = pip | default([]) %}{{ pip }}", &json!({"pyhton": "3"}));
        assert!(said.contains("\"pyhton\"") && said.contains("it takes pip, python"), "{said}");
        assert!(refusal("nothing", &json!({"x": 1})).contains("takes none"));
    }

    #[test]
    fn what_is_no_template_is_refused_with_its_line() {
        let said = refusal("one\ntwo {% if %}", &json!({}));
        assert!(said.contains("own.def.j2 line 2") && said.contains("syntax error"), "{said}");
        let endless = "{% for x in range(10000) %}{% for y in range(10000) %}{% endfor %}{% endfor %}";
        assert!(refusal(endless, &json!({})).contains("fuel"));
    }

    #[test]
    fn values_become_one_word_of_a_shell() {
        let given = variables(&json!({"x": "it's $HOME; `x`"}));
        assert_eq!(render("a", "{{ x | shell }}", &given).unwrap(), r"'it'\''s $HOME; `x`'");
    }

    #[test]
    fn every_shipped_template_renders_without_variables_and_says_what_it_takes() {
        for template in TEMPLATES {
            let text = render(template.name, template.text, &Map::new()).unwrap();
            assert!(text.starts_with("Bootstrap: "), "{text}");
            assert!(!text.contains("{{") && !text.contains("{%") && !text.contains("\n\n\n"), "{text}");
            let environment = Environment::new();
            let parsed = environment.template_from_str(template.text);
            // The filters are not known here, and need not be to read it.
            let comment = template.text.split("#}").next().unwrap();
            let taken = taken(template.text, parsed.unwrap().undeclared_variables(false));
            assert!(taken.len() > 2, "{taken:?}");
            for variable in taken {
                assert!(comment.contains(&format!("\n  {variable} ")), "{}: {variable}", template.name);
            }
        }
        assert!(shipped("pyton").unwrap_err().to_string().contains("minimal, python, swe, qemu"));
    }

    #[test]
    fn templates_build_on_what_they_are_told_to() {
        let render = |name: &str, given: &serde_json::Value| {
            render(name, shipped(name).unwrap().text, &variables(given)).unwrap()
        };
        let given = json!({"release": "trixie", "mirror": "http://mirror.test/debian"});
        let text = render("python", &given);
        assert!(
            text.starts_with(
                "Bootstrap: debootstrap\nOSVersion: trixie\nMirrorURL: http://mirror.test/debian\n\n%post\n"
            ),
            "{text}"
        );
        assert!(text.contains("python3-ipython\n    python3 -c"), "{text}");
        let text = render("python", &json!({"from": "docker://debian:12", "pip": ["numpy", "pandas<3"]}));
        assert!(text.starts_with("Bootstrap: docker\nFrom: debian:12\n\n%post\n"), "{text}");
        assert!(text.contains("--no-cache-dir 'numpy' 'pandas<3'\n    python3 -c"), "{text}");
        let given = json!({
            "from": "/images/base.sif", "packages": ["rustc"], "post": ["make -C /repo"], "env": {"A": "it's"},
            "files": [{"source": "repo", "target": "/repo"}],
        });
        let text = render("swe", &given);
        assert!(
            text.starts_with("Bootstrap: localimage\nFrom: /images/base.sif\n\n%files\n    repo /repo\n"),
            "{text}"
        );
        assert!(text.contains("python3-pytest 'rustc'\n    # A"), "{text}");
        assert!(text.contains("\n    make -C /repo\n"), "{text}");
        assert!(text.contains(r"export A='it'\''s'"), "{text}");
        let text = render("qemu", &json!({"from": "/b", "cpus": 2, "disk": "/my disk.qcow2"}));
        assert!(text.contains("-smp 2 -m 4096") && text.contains("file='/my disk.qcow2'"), "{text}");
        let text = render("minimal", &json!({"files": [{"source": "/a", "target": "/b"}], "env": {"X": 1}}));
        assert!(text.contains("\n\n%files\n    /a /b\n\n%environment\n    export X='1'\n\n%runscript\n"), "{text}");
    }
}
