//! Building from an unpacked folder, beside mksquashfs and Apptainer's own tool for image files.

use std::{fs, process::Stdio, sync::Arc, time::Duration};

use anyhow::Context;
use prorl_guest::Guest;
use prorl_sandbox::images::{BuildRequest, BuilderConfig, CacheMode, Definition, ImageBuilder, Quiet};
use serde::Serialize;
use tokio::{process::Command, time::Instant};

use super::{
    Args,
    material::{Material, run},
};
use crate::bench::{
    figures::{Spread, ratio},
    machine::find_program,
};

/// What it costs to make an image file of a folder, with zstd at level 1.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    bytes: u64,
    ours: Option<Spread>,
    /// mksquashfs, `sif new` and `sif add`, by hand.
    by_hand: Option<Spread>,
    /// Our p50 by theirs.
    ours_by_hand: Option<f64>,
}

pub(super) async fn measure(args: &Args, material: &Material) -> anyhow::Result<Figures> {
    let mksquashfs = find_program("mksquashfs").context("mksquashfs is not on PATH")?;
    let apptainer =
        find_program("apptainer").or_else(|| find_program("singularity")).context("apptainer is not on PATH")?;
    let guest = Guest::install()?;
    let builder = ImageBuilder::new(BuilderConfig::new(guest.path(), material.place("builds")))?;
    let tree = material.tree();
    let (ours_to, squashfs, by_hand_to) =
        (material.place("ours.sif"), material.place("by-hand.squashfs"), material.place("by-hand.sif"));
    let request = BuildRequest {
        definition: Definition::Text {
            name: "bench.def".to_owned(),
            text: format!("Bootstrap: localimage\nFrom: {}\n", tree.display()),
        },
        variables: serde_json::Map::new(),
        output: ours_to.clone(),
        mode: CacheMode::Scratch,
        locks: Vec::new(),
    };
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let mut bytes = 0;
    for _ in 0..args.n {
        let begun = Instant::now();
        builder.build_async(request.clone(), Arc::new(Quiet)).await?;
        ours.push(begun.elapsed());
        bytes = fs::metadata(&ours_to)?.len();
        fs::remove_file(&ours_to)?;

        let begun = Instant::now();
        let mut pack = Command::new(&mksquashfs);
        pack.arg(&tree).arg(&squashfs).args([
            "-comp",
            "zstd",
            "-Xcompression-level",
            "1",
            "-all-root",
            "-noappend",
            "-no-progress",
            "-quiet",
        ]);
        pack.args(["-processors", &args.threads().to_string()]);
        run(pack.stdin(Stdio::null())).await?;
        let mut sif = Command::new(&apptainer);
        run(sif.args(["sif", "new"]).arg(&by_hand_to).stdin(Stdio::null())).await?;
        let mut sif = Command::new(&apptainer);
        sif.args(["sif", "add", "--datatype", "4", "--partfs", "1", "--parttype", "2", "--partarch", "2"]);
        run(sif.arg(&by_hand_to).arg(&squashfs).stdin(Stdio::null())).await?;
        theirs.push(begun.elapsed());
        fs::remove_file(&squashfs)?;
        fs::remove_file(&by_hand_to)?;
    }
    let p50 = |times: &[Duration]| Spread::of(times.to_vec()).map(|spread| spread.p50_ms);
    let ours_by_hand = ratio(p50(&ours), p50(&theirs));
    Ok(Figures { bytes, ours: Spread::of(ours), by_hand: Spread::of(theirs), ours_by_hand })
}
