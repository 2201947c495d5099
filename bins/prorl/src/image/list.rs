//! `prorl image list`.

use std::{
    process::ExitCode,
    time::{Duration, SystemTime},
};

use anyhow::Context;
use comfy_table::{CellAlignment, Table, presets::NOTHING};
use prorl_guest::Guest;
use prorl_sandbox::store::ImageEntry;
use serde_json::{Value, json};

use super::{short, show_names};
use crate::{
    output,
    stores::{StoreArgs, show_count, show_size},
};

/// Arguments of `prorl image list`.
#[derive(clap::Args)]
pub(super) struct Args {
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
    let dir = args.store.dir()?;
    // A look makes no store.
    let (images, layers) = if args.store.is_missing()? {
        (Vec::new(), Vec::new())
    } else {
        let guest = Guest::install().context("the guest program cannot be made executable")?;
        let store = args.store.open(&guest, None)?;
        (store.list()?, store.list_layers()?)
    };
    if args.json {
        let images: Vec<_> = images.iter().map(for_programs).collect();
        output::say(json!({"store": dir.to_string_lossy(), "images": images, "layers": layers.len()}));
        return Ok(ExitCode::SUCCESS);
    }
    if images.is_empty() {
        output::note(format_args!("{} holds no image; `prorl image unpack` brings one", dir.display()));
    } else {
        output::say(table(&images));
    }
    if !layers.is_empty() {
        output::note(format_args!("and {} of running groups", show_count(layers.len() as u64, "layer")));
    }
    Ok(ExitCode::SUCCESS)
}

fn table(images: &[ImageEntry]) -> Table {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header(["NAME", "DIGEST", "SIZE", "FILES", "USED", "IN USE", "SOURCE"]);
    for image in images {
        table.add_row([
            show_names(image),
            short(&image.digest),
            show_size(image.size),
            image.filled.entries.to_string(),
            ago(image.last_used),
            image.n_refs.to_string(),
            image.filled.source.clone(),
        ]);
    }
    for idx in [2, 3, 5] {
        if let Some(column) = table.column_mut(idx) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Says how long ago a time was.
fn ago(time: SystemTime) -> String {
    let seconds = time.elapsed().unwrap_or(Duration::ZERO).as_secs();
    match seconds {
        0..60 => "just now".to_owned(),
        60..3600 => format!("{} min ago", seconds / 60),
        3600..86_400 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

/// Tells of an image for programs; times are seconds since 1970.
fn for_programs(image: &ImageEntry) -> Value {
    let last_used = image.last_used.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    json!({
        "names": image.names.iter().map(prorl_sandbox::store::ImageName::as_str).collect::<Vec<_>>(),
        "digest": image.digest.as_str(),
        "path": image.root.to_string_lossy(),
        "source": image.filled.source,
        "entries": image.filled.entries,
        "bytes": image.filled.bytes,
        "size": image.size,
        "last_used": last_used,
        "references": image.n_refs,
        "notes": image.filled.notes,
    })
}
