//! `prorl image build`.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use anyhow::Context;
use prorl_guest::Guest;
use prorl_sandbox::images::{BuildRequest, BuilderConfig, CacheMode, Definition, ImageBuilder};
use serde_json::json;

use super::bar::Bar;
use crate::{output, stop::Signals, stores::StoreArgs};

/// Arguments of `prorl image build`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// A definition file, a Jinja template of one (.j2, .jinja), or the name of a template that comes with prorl.
    #[arg(value_name = "DEFINITION", required_unless_present = "templates")]
    definition: Option<PathBuf>,
    /// The image [default: NAME.sif here].
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Set a variable of the template, a list or table as JSON; may be given again.
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<String>,
    /// When an image that is there will do: never (scratch), while its base and prorl are the same (versioned), or while the
    /// --lock files are the same (lock).
    #[arg(long, default_value = "versioned", value_parser = ["scratch", "versioned", "lock"])]
    cache: String,
    /// A file that pins what the image depends on, for --cache lock; may be given again.
    #[arg(long, value_name = "FILE")]
    lock: Vec<PathBuf>,
    /// The apptainer or singularity program [default: looked for along PATH].
    #[arg(long, env = "PRORL_APPTAINER", value_name = "PATH")]
    apptainer: Option<PathBuf>,
    /// List the templates that come with prorl.
    #[arg(long, conflicts_with = "definition")]
    templates: bool,
    #[command(flatten)]
    store: StoreArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  prorl image build --templates                              what there is to begin with
  prorl image build minimal                                  minimal.sif, with busybox alone
  prorl image build my.def.j2 --set python=3.11 -o my.sif    a template of your own
  prorl image build my.def --cache lock --lock requirements.txt";

/// The folder of a store where builders keep what they remember.
pub(super) const STATE: &str = "builds";

impl Args {
    pub(super) fn store(&self) -> Option<&StoreArgs> {
        (!self.templates).then_some(&self.store)
    }
}

pub(super) async fn main(args: Args) -> anyhow::Result<ExitCode> {
    if args.templates {
        tell_templates(args.json);
        return Ok(ExitCode::SUCCESS);
    }
    let request = match request(&args) {
        Ok(request) => request,
        Err(problem) => return Ok(output::usage(format_args!("{problem:#}"))),
    };
    if let Err(problem) = ImageBuilder::render(&request.definition, &request.variables) {
        // A definition or its variables: what was written on the command line.
        return Ok(output::usage(format_args!("{:#}", anyhow::Error::new(problem))));
    }
    let mut signals = Signals::take()?;
    let guest = Guest::install().context("the guest program cannot be made executable")?;
    let store = args.store.open(&guest, None)?;
    let config = BuilderConfig {
        apptainer: args.apptainer.clone(),
        ..BuilderConfig::new(guest.path(), store.dir().join(STATE))
    };
    let builder = ImageBuilder::new(config)?;
    let bar = Arc::new(Bar::new(&request.output.display().to_string()));
    let built = tokio::select! {
        built = builder.build_async(request, Arc::clone(&bar) as _) => built?,
        signal = signals.next() => anyhow::bail!("ended by {signal}; nothing of the image is left"),
    };
    bar.clear();
    if args.json {
        output::say(json!({
            "path": built.path.to_string_lossy(),
            "digest": built.digest.as_str(),
            "reused": built.reused,
            "reason": built.reason,
            "took_s": built.took.as_secs_f64(),
        }));
    } else {
        output::say(format_args!("{}  {}\n{}", built.path.display(), built.digest, built.reason));
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads the arguments.
fn request(args: &Args) -> anyhow::Result<BuildRequest> {
    let given = args.definition.as_ref().context("a definition is needed")?;
    let definition = definition(given)?;
    let mut variables = serde_json::Map::new();
    for pair in &args.set {
        let (name, value) = pair.split_once('=').with_context(|| format!("--set {pair}: expected NAME=VALUE"))?;
        anyhow::ensure!(!name.is_empty(), "--set {pair}: expected NAME=VALUE");
        variables.insert(name.to_owned(), value_of(value).with_context(|| format!("--set {name}"))?);
    }
    let mode = match args.cache.as_str() {
        "scratch" => CacheMode::Scratch,
        "lock" => CacheMode::Lock,
        _ => CacheMode::Versioned,
    };
    anyhow::ensure!(mode != CacheMode::Lock || !args.lock.is_empty(), "--cache lock: expected a --lock file");
    anyhow::ensure!(mode == CacheMode::Lock || args.lock.is_empty(), "--lock counts with --cache lock alone");
    let output = args.output.clone().map_or_else(|| default_output(given), Ok)?;
    Ok(BuildRequest { definition, variables, output, mode, locks: args.lock.clone() })
}

/// Reads a list or a table of names as JSON, everything else as text.
fn value_of(text: &str) -> anyhow::Result<serde_json::Value> {
    if text.starts_with(['[', '{']) {
        return serde_json::from_str(text).with_context(|| format!("{text} begins as JSON does and is none"));
    }
    Ok(text.into())
}

/// A file of that name comes first; templates have names without a dot.
fn definition(given: &Path) -> anyhow::Result<Definition> {
    if given.is_file() {
        return Ok(Definition::File(given.to_owned()));
    }
    let templates: Vec<_> = ImageBuilder::templates().iter().map(|template| template.name).collect();
    match templates.iter().find(|name| Path::new(name) == given) {
        Some(name) => Ok(Definition::Template((*name).to_owned())),
        None => {
            anyhow::bail!("{}: expected a definition file, or a template: {}", given.display(), templates.join(", "))
        }
    }
}

/// Names an image after its definition: `python.sif` for `images/python.def.j2`.
fn default_output(definition: &Path) -> anyhow::Result<PathBuf> {
    let mut stem = definition.file_name().map(PathBuf::from).context("the definition has no name")?;
    while let Some(ending) = stem.extension()
        && ["def", "j2", "jinja"].iter().any(|known| ending == *known)
    {
        stem.set_extension("");
    }
    let mut name = stem.into_os_string();
    name.push(".sif");
    Ok(name.into())
}

fn tell_templates(is_for_programs: bool) {
    let templates = ImageBuilder::templates();
    if is_for_programs {
        let list: Vec<_> =
            templates.iter().map(|one| json!({"name": one.name, "about": one.about, "text": one.text})).collect();
        output::say(serde_json::Value::from(list));
        return;
    }
    for template in templates {
        output::say(format_args!("{:10} {}", template.name, template.about));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_called_as_its_definition() {
        for (definition, image) in [
            ("minimal", "minimal.sif"),
            ("a/python.def.j2", "python.sif"),
            ("x.def", "x.sif"),
            ("v1.2.def", "v1.2.sif"),
        ] {
            assert_eq!(default_output(Path::new(definition)).unwrap(), Path::new(image));
        }
    }
}
