//! `prorl image prefetch`: every image that a data file names, before the jobs that need it.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader},
    num::NonZeroUsize,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::Context;
use indicatif::{MultiProgress, ProgressDrawTarget};
use prorl_agents::runtimes::HOST_IMAGE;
use prorl_guest::Guest;
use prorl_sandbox::{
    images::{ImageError, Progress, Source, Unpacker},
    store::{ImageName, ImageStore, StoredImage},
};
use serde_json::{Map, Value, json};
use tokio::task::JoinSet;

use super::{UnpackArgs, bar::Bar};
use crate::{
    output,
    stop::Signals,
    stores::{StoreArgs, show_count},
};

/// How many of the lines that name an image are told.
const SHOWN_LINES: usize = 5;

/// How an image of a registry begins.
const REGISTRY: &str = "docker://";

/// How a text begins that says where an image comes from and is no path.
const SCHEMES: [&str; 3] = [REGISTRY, "docker-archive:", "oci:"];

/// Arguments of `prorl image prefetch`.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Tasks, one JSON object a line: an instance, or a whole request with an `instance`.
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Images unpacked at the same time.
    #[arg(long, default_value = "2", value_name = "N")]
    jobs: NonZeroUsize,
    #[command(flatten)]
    unpack: UnpackArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// What became of one image.
enum End {
    /// It was there already: in the store, or as an unpacked folder.
    Present,
    Unpacked,
    /// It is nowhere to be found.
    Missing(String),
    /// It is somewhere, and does not unpack.
    Failed(String),
}

impl Args {
    pub(super) fn store(&self) -> &StoreArgs {
        &self.unpack.store
    }
}

pub(super) async fn main(args: Args) -> anyhow::Result<ExitCode> {
    let named = read_images(&args.data)?;
    let mut signals = Signals::take()?;
    let guest = Guest::install().context("the guest program cannot be made executable")?;
    let store = args.unpack.store.open(&guest, args.unpack.owner()?)?;
    let fetcher = Arc::new(Fetcher {
        unpacker: args.unpack.unpacker(store.clone(), args.jobs.get()),
        store,
        bars: MultiProgress::with_draw_target(ProgressDrawTarget::stderr()),
        naming: Mutex::default(),
    });
    let ends = tokio::select! {
        ends = fetch_all(&args, &named, &fetcher) => ends?,
        // Images that are in the store by now stay there, so that the next try goes on from here.
        signal = signals.next() => anyhow::bail!("ended by {signal}; the same command goes on where this one was ended"),
    };
    Ok(tell(&args, &named, &ends))
}

/// Returns the images that the tasks name beside the host, each with the numbers of its lines.
fn read_images(path: &Path) -> anyhow::Result<BTreeMap<String, Vec<usize>>> {
    let name = path.display();
    let file = File::open(path).with_context(|| format!("failed to open {name}"))?;
    let mut named = BTreeMap::<String, Vec<usize>>::new();
    for (idx, line) in BufReader::new(file).lines().enumerate() {
        let at = || format!("{name} line {}", idx + 1);
        let line = line.with_context(at)?;
        if line.trim().is_empty() {
            continue;
        }
        let row: Map<String, Value> =
            serde_json::from_str(&line).with_context(|| format!("{} is no JSON object", at()))?;
        let instance = match row.get("instance") {
            Some(Value::Object(instance)) => instance,
            Some(_) => anyhow::bail!("{}: instance is no JSON object", at()),
            None => &row,
        };
        match instance.get("image") {
            None | Some(Value::Null) => {}
            Some(Value::String(image)) if image == HOST_IMAGE => {}
            Some(Value::String(image)) => named.entry(image.clone()).or_default().push(idx + 1),
            Some(other) => anyhow::bail!("{}: image: expected text, found {other}", at()),
        }
    }
    Ok(named)
}

/// What brings images into the store.
struct Fetcher {
    store: ImageStore,
    unpacker: Unpacker,
    bars: MultiProgress,
    /// Held from the look at who has a name to its giving, so that two images of one name are told from each other.
    naming: Mutex<()>,
}

/// Brings all images into the store, so many at a time.
async fn fetch_all(
    args: &Args,
    named: &BTreeMap<String, Vec<usize>>,
    fetcher: &Arc<Fetcher>,
) -> anyhow::Result<BTreeMap<String, End>> {
    let all = fetcher.bars.add(output::progress(named.len() as u64, "images"));
    let mut left = named.keys();
    let mut running = JoinSet::new();
    let mut ends = BTreeMap::new();
    loop {
        while running.len() < args.jobs.get()
            && let Some(image) = left.next()
        {
            let (image, fetcher) = (image.clone(), Arc::clone(fetcher));
            running.spawn(async move {
                let end = fetcher.fetch(&image).await;
                (image, end)
            });
        }
        let Some(ended) = running.join_next().await else { break };
        let (image, end) = ended.context("fetching an image broke")?;
        all.inc(1);
        ends.insert(image, end);
    }
    all.finish_and_clear();
    Ok(ends)
}

impl Fetcher {
    /// Finds an image as a server does: a name of the store comes before a path.
    async fn fetch(&self, image: &str) -> End {
        if let Ok(name) = ImageName::try_from(image.to_owned()) {
            match self.store.named(&name) {
                Ok(Some(_)) => return End::Present,
                Ok(None) => {}
                Err(error) => return End::Failed(chain(&error)),
            }
        }
        let path = Path::new(image);
        if path.is_dir() {
            // Sandboxes start from an unpacked folder as it is.
            return End::Present;
        }
        let is_path = path.exists();
        let source = match if is_path { at_path(path) } else { Source::parse(image).map_err(|error| chain(&error)) } {
            Ok(source) => source,
            Err(problem) => return End::Failed(problem),
        };
        if !is_path && !SCHEMES.iter().any(|scheme| image.starts_with(scheme)) {
            return End::Missing("neither an image of the store nor a file".to_owned());
        }
        let bar: Arc<dyn Progress> = Arc::new(Bar::among(&self.bars, image));
        let made = match self.unpacker.unpack_async(source.clone(), bar).await {
            Ok(made) => made,
            // Of a registry, which cannot be asked.
            Err(error @ ImageError::Program { .. }) => return End::Missing(chain(&error)),
            Err(error) => return End::Failed(chain(&error)),
        };
        // A path is known by what is there, and needs no name; a registry's image has been given its own.
        if !is_path
            && !image.starts_with(REGISTRY)
            && let Err(problem) = self.name(&source.default_name(), &made)
        {
            return End::Failed(problem);
        }
        if made.is_new() { End::Unpacked } else { End::Present }
    }

    /// Gives an image a name that no other has.
    fn name(&self, name: &ImageName, image: &StoredImage) -> Result<(), String> {
        let _alone = self.naming.lock().unwrap_or_else(PoisonError::into_inner);
        let digest = &image.filled().digest;
        match self.store.named(name).map_err(|error| chain(&error))? {
            Some(other) if other.filled().digest == *digest => Ok(()),
            Some(_) => Err(format!("the name {name} is another image's: unpack it by `prorl image unpack --name`")),
            None => self.store.set_name(name, digest).map_err(|error| chain(&error)),
        }
    }
}

/// Makes a source of a path. One with a colon would be taken for something else as it is written.
fn at_path(path: &Path) -> Result<Source, String> {
    let absolute = std::path::absolute(path).map_err(|error| chain(&error))?;
    let text = absolute.to_str().ok_or_else(|| format!("the path {} is not UTF-8", absolute.display()))?;
    Source::parse(text).map_err(|error| chain(&error))
}

fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

fn tell(args: &Args, named: &BTreeMap<String, Vec<usize>>, ends: &BTreeMap<String, End>) -> ExitCode {
    let of = |pick: fn(&End) -> bool| ends.values().filter(|end| pick(end)).count();
    let present = of(|end| matches!(end, End::Present));
    let unpacked = of(|end| matches!(end, End::Unpacked));
    let troubled = |pick: fn(&End) -> Option<&String>| {
        let told = ends.iter().filter_map(|(image, end)| pick(end).map(|why| (image, why)));
        told.map(|(image, why)| (image.clone(), why.clone())).collect::<Vec<_>>()
    };
    let missing = troubled(|end| if let End::Missing(why) = end { Some(why) } else { None });
    let failed = troubled(|end| if let End::Failed(why) = end { Some(why) } else { None });
    if args.json {
        let list = |images: &[(String, String)]| -> Vec<Value> {
            images.iter().map(|(image, why)| json!({"image": image, "problem": why, "lines": named[image]})).collect()
        };
        output::say(json!({
            "images": ends.len(),
            "present": present,
            "unpacked": unpacked,
            "missing": list(&missing),
            "failed": list(&failed),
        }));
    } else {
        output::say(format_args!(
            "{}: {present} were there, {unpacked} unpacked, {} missing, {} failed",
            show_count(ends.len() as u64, "image"),
            missing.len(),
            failed.len()
        ));
        for (word, images) in [("missing", &missing), ("failed", &failed)] {
            for (image, why) in images {
                output::say(format_args!("{word}: {image} ({}): {why}", lines(&named[image])));
            }
        }
    }
    if missing.is_empty() && failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Names the first of some lines.
fn lines(numbers: &[usize]) -> String {
    let shown: Vec<_> = numbers.iter().take(SHOWN_LINES).map(ToString::to_string).collect();
    let word = if numbers.len() == 1 { "line" } else { "lines" };
    let more = numbers.len().saturating_sub(SHOWN_LINES);
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{word} {}{rest}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn images_of_instances_and_of_requests_are_found_once() {
        let data = file(
            "{\"image\": \"a.sif\"}\n{\"image\": \"host\"}\n{\"instance\": {\"image\": \"b\"}}\n{\"instance\": {\"image\": \"a.sif\"}}\n\n{\"prompt\": \"x\"}\n",
        );
        let named = read_images(data.path()).unwrap();
        assert_eq!(named.into_iter().collect::<Vec<_>>(), [("a.sif".into(), vec![1, 4]), ("b".into(), vec![3])]);
    }

    #[test]
    fn a_line_that_is_no_task_is_named() {
        for (text, expected) in [
            ("{}\nnonsense\n", "line 2 is no JSON object"),
            ("{\"image\": 5}\n", "line 1: image: expected text, found 5"),
            ("{\"instance\": []}\n", "line 1: instance is no JSON object"),
        ] {
            let data = file(text);
            let error = format!("{:#}", read_images(data.path()).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn few_lines_are_named() {
        assert_eq!(lines(&[3]), "line 3");
        assert_eq!(lines(&[1, 2, 3, 4, 5, 6, 7]), "lines 1, 2, 3, 4, 5 and 2 more");
    }
}
