//! `prorl image unpack`.

use std::{process::ExitCode, sync::Arc};

use anyhow::Context;
use prorl_guest::Guest;
use prorl_sandbox::{
    images::{Source, Unpacker},
    store::{Digest, ImageName, ImageStore, StoredImage},
};
use serde_json::{Value, json};

use super::{UnpackArgs, bar::Bar, show_names};
use crate::{
    output,
    stop::Signals,
    stores::{StoreArgs, show_count, show_size},
};

/// Arguments of `prorl image unpack`.
#[derive(clap::Args)]
pub(super) struct Args {
    /// The image: a .sif, squashfs or folder, docker-archive:PATH, oci:PATH, or `docker://NAME`.
    #[arg(value_name = "SRC")]
    source: String,
    /// What to call it in the store [default: from the source, such as `python` for images/python.sif].
    #[arg(long)]
    name: Option<String>,
    /// Fetch a docker:// image again although the store has one of its name: a tag may have come to mean another image.
    #[arg(long)]
    refresh: bool,
    #[command(flatten)]
    unpack: UnpackArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(super) fn store(&self) -> &StoreArgs {
        &self.unpack.store
    }
}

pub(super) async fn main(args: Args) -> anyhow::Result<ExitCode> {
    let source = match Source::parse(&args.source) {
        Ok(source) => source,
        Err(problem) => return Ok(output::usage(problem)),
    };
    let name = match args.name.clone().map(ImageName::try_from).transpose() {
        Ok(name) => name.unwrap_or_else(|| source.default_name()),
        Err(problem) => return Ok(output::usage(format_args!("--name: {problem}"))),
    };
    if args.refresh && !args.source.starts_with("docker://") {
        return Ok(output::usage(
            "--refresh counts with docker:// alone: whether a file has changed is always looked up",
        ));
    }
    let mut signals = Signals::take()?;
    let guest = Guest::install().context("the guest program cannot be made executable")?;
    let store = args.unpack.store.open(&guest, args.unpack.owner()?)?;
    let unpacker = Unpacker { refresh: args.refresh, ..args.unpack.unpacker(store.clone(), 1) };
    // Before the work: the unpacker names what it fetches. A damaged image has no name that could be missed.
    let before = store.named(&name).ok().flatten().map(|image| image.filled().digest.clone());
    let bar = Arc::new(Bar::new(name.as_str()));
    let image = tokio::select! {
        image = unpacker.unpack_async(source.clone(), Arc::clone(&bar) as _) => image?,
        signal = signals.next() => anyhow::bail!("ended by {signal}; nothing of the image is left"),
    };
    bar.clear();
    store.set_name(&name, &image.filled().digest)?;
    let moved_from = before.filter(|digest| *digest != image.filled().digest);
    if let Some(digest) = &moved_from {
        output::note(format_args!(
            "note: the name {name} was that of {digest}, which keeps {}",
            names_left(&store, digest)?
        ));
    }
    tell(&args, &name, &image, moved_from.as_ref());
    Ok(ExitCode::SUCCESS)
}

/// Says what else an image is called that has lost a name.
fn names_left(store: &ImageStore, digest: &Digest) -> anyhow::Result<String> {
    let image = store.list()?.into_iter().find(|image| image.digest == *digest);
    let named = image.filter(|image| !image.names.is_empty());
    Ok(named.map_or_else(|| "no name".to_owned(), |image| format!("others: {}", show_names(&image))))
}

fn tell(args: &Args, name: &ImageName, image: &StoredImage, moved_from: Option<&Digest>) {
    if args.json {
        output::say(summary(name, image, moved_from));
        return;
    }
    for note in &image.filled().notes {
        output::note(format_args!("note: {note}"));
    }
    let filled = image.filled();
    output::say(format_args!(
        "{name}  {}  {}, {} of data\n{}",
        filled.digest,
        show_count(filled.entries, "file"),
        show_size(filled.bytes),
        image.root().display()
    ));
}

/// Tells of an image for programs.
fn summary(name: &ImageName, image: &StoredImage, moved_from: Option<&Digest>) -> Value {
    let filled = image.filled();
    json!({
        "name": name.as_str(),
        "digest": filled.digest.as_str(),
        "moved_from": moved_from.map(Digest::as_str),
        "unpacked": image.is_new(),
        "path": image.root().to_string_lossy(),
        "source": filled.source,
        "entries": filled.entries,
        "bytes": filled.bytes,
        "env": filled.env,
        "notes": filled.notes,
    })
}
