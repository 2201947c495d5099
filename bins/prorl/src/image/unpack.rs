//! `prorl image unpack`.

use std::{process::ExitCode, sync::Arc};

use anyhow::Context;
use prorl_guest::Guest;
use prorl_sandbox::{
    images::Source,
    store::{ImageName, StoredImage},
};
use serde_json::{Value, json};

use super::{UnpackArgs, bar::Bar};
use crate::{output, stop::Signals, stores::show_size};

/// Arguments of `prorl image unpack`.
#[derive(clap::Args)]
pub(super) struct Args {
    /// The image: a .sif, squashfs or folder, docker-archive:PATH, oci:PATH, or `docker://NAME`.
    #[arg(value_name = "SRC")]
    source: String,
    /// What to call it in the store [default: from the source, such as `python` for images/python.sif].
    #[arg(long)]
    name: Option<String>,
    #[command(flatten)]
    unpack: UnpackArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
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
    let mut signals = Signals::take()?;
    let guest = Guest::install().context("the guest program cannot be made executable")?;
    let store = args.unpack.store.open(&guest, args.unpack.owner()?)?;
    let unpacker = args.unpack.unpacker(store.clone(), 1);
    let bar = Arc::new(Bar::new(name.as_str()));
    let image = tokio::select! {
        image = unpacker.unpack_async(source.clone(), Arc::clone(&bar) as _) => image?,
        signal = signals.next() => anyhow::bail!("ended by {signal}; nothing of the image is left"),
    };
    bar.clear();
    store.set_name(&name, &image.filled().digest)?;
    tell(&args, &name, &image);
    Ok(ExitCode::SUCCESS)
}

fn tell(args: &Args, name: &ImageName, image: &StoredImage) {
    if args.json {
        output::say(summary(name, image));
        return;
    }
    for note in &image.filled().notes {
        output::note(format_args!("note: {note}"));
    }
    let filled = image.filled();
    output::say(format_args!(
        "{name}  {}  {} files, {}\n{}",
        filled.digest,
        filled.entries,
        show_size(filled.bytes),
        image.root().display()
    ));
}

/// Tells of an image for programs.
fn summary(name: &ImageName, image: &StoredImage) -> Value {
    let filled = image.filled();
    json!({
        "name": name.as_str(),
        "digest": filled.digest.as_str(),
        "unpacked": image.is_new(),
        "path": image.root(),
        "source": filled.source,
        "entries": filled.entries,
        "bytes": filled.bytes,
        "env": filled.env,
        "notes": filled.notes,
    })
}
