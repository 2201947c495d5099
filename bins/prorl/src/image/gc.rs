//! `prorl image gc`.

use std::{process::ExitCode, time::Duration};

use anyhow::Context;
use prorl_guest::Guest;
use prorl_sandbox::{
    images::{BuilderConfig, ImageBuilder},
    store::{Collect, Collected, Digest, ImageEntry, ImageName, ImageStore},
};
use serde_json::json;

use super::{SHORT_DIGITS, build::STATE, short, show_names};
use crate::{
    output,
    stores::{StoreArgs, parse_size, show_count, show_size},
};

/// Arguments of `prorl image gc`.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Images to remove, by name, or by at least the 12 digits of a digest that `list` shows.
    #[arg(value_name = "IMAGE")]
    images: Vec<String>,
    /// Remove images, the one unused for longest first, until the store is no larger than this, such as 20G.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    max_size: Option<u64>,
    /// Remove images that nobody has used for this long, such as 30d or 12h.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    unused_for: Option<Duration>,
    /// Only tell what would be removed.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    store: StoreArgs,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Args {
    pub(super) fn store(&self) -> &StoreArgs {
        &self.store
    }
}

pub(super) fn main(args: &Args) -> anyhow::Result<ExitCode> {
    // Where there is no store nothing is removed, and none is made for that.
    if args.store.is_missing()? {
        if let Some(image) = args.images.first() {
            anyhow::bail!("the store {} has no image {image}", args.store.dir()?.display());
        }
        tell(args, &Collected::default(), &[]);
        return Ok(ExitCode::SUCCESS);
    }
    let guest = Guest::install().context("the guest program cannot be made executable")?;
    let store = args.store.open(&guest, None)?;
    let images = store.list()?;
    let mut named = Vec::new();
    for image in &args.images {
        match find(&images, image)? {
            Some(digest) => named.push(digest),
            None => anyhow::bail!("the store {} has no image {image}", store.dir().display()),
        }
    }
    let wanted =
        Collect { max_bytes: args.max_size, unused_for: args.unused_for, remove: named.clone(), dry_run: args.dry_run };
    let done = store.collect(&wanted)?;
    if !args.dry_run {
        sweep_builds(&guest, &store);
    }
    tell(args, &done, &images);
    let kept: Vec<_> = named.iter().filter(|digest| done.in_use.contains(digest)).collect();
    if !args.json {
        for digest in &kept {
            output::note(format_args!("{digest} is in use and stays"));
        }
    }
    Ok(if kept.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Tells what was removed of the images that there were.
fn tell(args: &Args, done: &Collected, images: &[ImageEntry]) {
    if args.json {
        output::say(json!({
            "removed": done.removed.iter().map(Digest::as_str).collect::<Vec<_>>(),
            "in_use": done.in_use.iter().map(Digest::as_str).collect::<Vec<_>>(),
            "layers": done.layers,
            "leftovers": done.n_leftovers,
            "left": done.left,
            "freed_bytes": done.freed_bytes,
            "dry_run": args.dry_run,
        }));
        return;
    }
    let verb = if args.dry_run { "would remove" } else { "removed" };
    for image in images.iter().filter(|image| done.removed.contains(&image.digest)) {
        output::say(format_args!("{verb} {}  {}  {}", show_names(image), short(&image.digest), image.filled.source));
    }
    let mut total = show_count(done.removed.len() as u64, "image");
    if !done.layers.is_empty() {
        total = format!("{total} and {}", show_count(done.layers.len() as u64, "layer"));
    }
    output::say(format_args!("{verb} {total}, {}", show_size(done.freed_bytes)));
    if done.n_leftovers > 0 {
        output::note(format_args!("{verb} {} of dead processes", show_count(done.n_leftovers as u64, "leftover")));
    }
    for problem in &done.left {
        output::note(format_args!("note: {problem}"));
    }
}

/// Removes what builds have left that were ended.
fn sweep_builds(guest: &Guest, store: &ImageStore) {
    let state = store.dir().join(STATE);
    if !state.is_dir() {
        return;
    }
    // A new builder begins with it.
    if let Err(problem) = ImageBuilder::new(BuilderConfig::new(guest.path(), state)) {
        output::note(format_args!("what builds have left stays: {:#}", anyhow::Error::new(problem)));
    }
}

/// Finds an image by its name, or by the first digits of its digest where they are one image's alone.
fn find(images: &[ImageEntry], given: &str) -> anyhow::Result<Option<Digest>> {
    let name = ImageName::try_from(given.to_owned()).ok();
    if let Some(image) = images.iter().find(|image| image.names.iter().any(|own| Some(own) == name.as_ref())) {
        return Ok(Some(image.digest.clone()));
    }
    // Fewer digits could be a name with a typing error.
    let digits = given.strip_prefix("sha256:").unwrap_or(given);
    let mut found =
        images.iter().filter(|image| digits.len() >= SHORT_DIGITS && image.digest.hex().starts_with(digits));
    match (found.next(), found.next()) {
        (Some(image), None) => Ok(Some(image.digest.clone())),
        (Some(_), Some(_)) => anyhow::bail!("{given} is the beginning of several digests"),
        (None, _) => Ok(None),
    }
}

/// Reads a time such as `30d` or `12h`.
fn parse_time(text: &str) -> Result<Duration, String> {
    let expected = || format!("expected a number with s, m, h or d, such as 30d, found {text:?}");
    let unit = text.chars().last().ok_or_else(expected)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        _ => return Err(expected()),
    };
    let number: u64 = text[..text.len() - 1].parse().map_err(|_| expected())?;
    Ok(Duration::from_secs(number.saturating_mul(seconds)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_need_a_unit() {
        assert_eq!(parse_time("30d"), Ok(Duration::from_hours(24 * 30)));
        assert_eq!(parse_time("0s"), Ok(Duration::ZERO));
        for wrong in ["", "30", "d", "1.5h", "-1d", "3ü"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }
}
