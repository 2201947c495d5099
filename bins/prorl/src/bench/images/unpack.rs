//! Unpacking: beside unsquashfs, once more, and by many processes at once.

use std::{fs, path::Path, process::Stdio, sync::Arc, time::Duration};

use anyhow::{Context, ensure};
use prorl_sandbox::{
    images::{Quiet, Source, Unpacker},
    store::{ImageStore, StoreConfig},
};
use serde::Serialize;
use serde_json::Value;
use tokio::{process::Command, task::JoinSet, time::Instant};

use super::{
    Args,
    material::{Material, run},
};
use crate::{
    bench::{
        figures::{Spread, millis, ratio},
        machine::find_program,
    },
    output,
};

/// Ways of packing: our own builds' and Apptainer's.
const PACKINGS: &[(&str, &[&str])] =
    &[("zstd-1", &["-comp", "zstd", "-Xcompression-level", "1"]), ("gzip", &["-comp", "gzip"])];

/// How often an image that is there is asked for.
const HITS: u32 = 200;

/// One way of packing.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    packing: &'static str,
    packed_bytes: u64,
    /// From the call to an image that sandboxes can start from, its digest included.
    ours: Option<Spread>,
    unsquashfs: Option<Spread>,
    /// Our p50 by theirs.
    ours_by_unsquashfs: Option<f64>,
    /// The quickest of ours by the quickest of theirs.
    quickest_by_unsquashfs: Option<f64>,
}

/// Many processes and one image.
#[derive(Debug, Serialize)]
pub(super) struct Once {
    processes: u32,
    /// How many of them unpacked it themselves.
    unpacked_by: u64,
    total_ms: f64,
}

pub(super) async fn measure(args: &Args, material: &Material) -> anyhow::Result<(Vec<Figures>, Option<Spread>, Once)> {
    let mksquashfs = find_program("mksquashfs").context("mksquashfs of squashfs-tools is not on PATH")?;
    let unsquashfs = find_program("unsquashfs");
    let threads = args.threads().get().to_string();
    let mut all = Vec::new();
    let (mut hit, mut once) = (None, None);
    for (packing, options) in PACKINGS {
        let packed = material.place(&format!("{packing}.squashfs"));
        let mut pack = Command::new(&mksquashfs);
        pack.arg(material.tree()).arg(&packed).args(*options).args([
            "-all-root",
            "-noappend",
            "-no-progress",
            "-quiet",
        ]);
        run(pack.stdin(Stdio::null())).await?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..args.n {
            let place = material.place(&format!("store-{packing}-{round}"));
            ours.push(unpack(args, &packed, &place).await?);
            if round == 0 && hit.is_none() {
                hit = Some(hits(args, &packed, &place).await?);
            }
            fs::remove_dir_all(&place)?;
            let Some(program) = &unsquashfs else { continue };
            let begun = Instant::now();
            let mut bare = Command::new(program);
            bare.args(["-q", "-n", "-processors", &threads, "-d"]).arg(&place).arg(&packed);
            run(bare.stdin(Stdio::null())).await?;
            theirs.push(begun.elapsed());
            fs::remove_dir_all(&place)?;
        }
        let quickest = |times: &[Duration]| times.iter().min().copied().map(millis);
        let quickest = ratio(quickest(&ours), quickest(&theirs));
        let (ours, theirs) = (Spread::of(ours), Spread::of(theirs));
        all.push(Figures {
            packing,
            packed_bytes: fs::metadata(&packed)?.len(),
            ours_by_unsquashfs: ratio(ours.as_ref().map(|s| s.p50_ms), theirs.as_ref().map(|s| s.p50_ms)),
            quickest_by_unsquashfs: quickest,
            ours,
            unsquashfs: theirs,
        });
        if once.is_none() {
            once = Some(ask_at_once(args, &packed, &material.place("store-once")).await?);
        }
    }
    if unsquashfs.is_none() {
        output::note("note: unsquashfs is not on PATH, so there is nothing to compare with");
    }
    Ok((all, hit.flatten(), once.context("nothing was unpacked")?))
}

/// Unpacks into a fresh store, by one call as a handler makes it.
async fn unpack(args: &Args, packed: &Path, store: &Path) -> anyhow::Result<Duration> {
    let (unpacker, source) = unpacker(args, packed, store)?;
    let begun = Instant::now();
    let image = unpacker.unpack_async(source.clone(), Arc::new(Quiet)).await?;
    let took = begun.elapsed();
    ensure!(image.root().is_dir(), "the image is not there");
    Ok(took)
}

/// Asks again for an image that is there, each time as a process does that has just begun.
async fn hits(args: &Args, packed: &Path, store: &Path) -> anyhow::Result<Option<Spread>> {
    let mut times = Vec::new();
    for _ in 0..HITS {
        let begun = Instant::now();
        let (unpacker, source) = unpacker(args, packed, store)?;
        let image = unpacker.unpack_async(source.clone(), Arc::new(Quiet)).await?;
        times.push(begun.elapsed());
        drop(image);
    }
    Ok(Spread::of(times))
}

fn unpacker(args: &Args, packed: &Path, store: &Path) -> anyhow::Result<(Unpacker, Source)> {
    let store = ImageStore::open(StoreConfig::new(store))?;
    let source = Source::parse(packed.to_str().context("TMPDIR is no UTF-8")?)?;
    Ok((Unpacker { threads: args.threads(), ..Unpacker::new(store) }, source))
}

/// Has many processes ask for one image that is not there yet.
async fn ask_at_once(args: &Args, packed: &Path, store: &Path) -> anyhow::Result<Once> {
    let prorl = std::env::current_exe()?;
    let begun = Instant::now();
    let mut running = JoinSet::new();
    for _ in 0..args.processes {
        let mut command = Command::new(&prorl);
        command.args(["image", "unpack", "--json", "--store"]).arg(store).arg(packed);
        command.stdin(Stdio::null()).kill_on_drop(true);
        running.spawn(async move { command.output().await });
    }
    let mut unpacked_by = 0;
    while let Some(ran) = running.join_next().await {
        let ran = ran??;
        let words = String::from_utf8_lossy(&ran.stderr);
        ensure!(ran.status.success(), "prorl image unpack failed ({}): {}", ran.status, words.trim());
        let said: Value = serde_json::from_slice(&ran.stdout)?;
        unpacked_by += u64::from(said["unpacked"] == true);
    }
    let total_ms = millis(begun.elapsed());
    fs::remove_dir_all(store)?;
    Ok(Once { processes: args.processes, unpacked_by, total_ms })
}
