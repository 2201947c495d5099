//! Sandboxes that start from the state after init, beside plain ones.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, ensure};
use prorl_sandbox::{
    Image, Runtime, Sandbox, SandboxSpec,
    store::{ImageStore, StoreConfig},
};
use prorl_tools::host::{ExecSpec, ToolClient};
use serde::Serialize;
use tokio::time::Instant;

use super::{Args, material::Material};
use crate::{
    bench::{
        figures::{Spread, millis, ratio},
        runtimes::Runtimes,
    },
    sandboxes,
};

/// How long a sandbox may take to end by itself.
const GRACE: Duration = Duration::from_secs(2);

/// How long the making of the files may take.
const LIMIT: Duration = Duration::from_mins(5);

/// Starts that are not counted.
const WARM_UPS: u32 = 3;

/// What it costs to begin with a state.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    files: u32,
    /// From the call of `freeze` to a layer that sandboxes can start from; the end of the first sandbox is in it.
    freeze_ms: f64,
    plain: Option<Spread>,
    fork: Option<Spread>,
    /// Our p50 of a fork by that of a plain start.
    fork_by_plain: Option<f64>,
    /// What is in the writable layer of a fresh plain sandbox.
    plain_written_bytes: u64,
    /// What is in that of a fresh fork.
    fork_written_bytes: u64,
}

pub(super) async fn measure(args: &Args, material: &Material) -> anyhow::Result<Figures> {
    let runtimes = Runtimes::make()?;
    let owner = sandboxes::owner(None)?;
    let store = ImageStore::open(StoreConfig {
        owner,
        guest: Some(runtimes.guest().to_owned()),
        ..StoreConfig::new(material.place("store-fork"))
    })?;
    let runtime: Arc<dyn Runtime> = Arc::clone(&runtimes.namespace);
    let plain = runtimes.spec(Image::Host);

    let first = runtime.start(&SandboxSpec { freezable: true, ..plain.clone() }).await?;
    let (first, client) = make_files(first, args.files).await?;
    let begun = Instant::now();
    let layer = first.freeze(&store).await?;
    let freeze_ms = millis(begun.elapsed());
    drop(client); // which ends the sandbox, should it still be there
    ensure!(layer.record().entries >= u64::from(args.files), "the layer has {} entries", layer.record().entries);

    let fork = SandboxSpec { layers: vec![layer], ..plain.clone() };
    let (mut plains, mut forks) = (Vec::new(), Vec::new());
    for round in 0..args.starts + WARM_UPS {
        for (spec, times) in [(&plain, &mut plains), (&fork, &mut forks)] {
            let begun = Instant::now();
            let sandbox = runtime.start(spec).await?;
            let took = begun.elapsed();
            sandbox.shutdown(GRACE).await?;
            if round >= WARM_UPS {
                times.push(took);
            }
        }
    }
    let (plain_written_bytes, fork_written_bytes) =
        (written(&*runtime, &plain).await?, written(&*runtime, &fork).await?);
    let (plain, fork) = (Spread::of(plains), Spread::of(forks));
    let fork_by_plain = ratio(fork.as_ref().map(|s| s.p50_ms), plain.as_ref().map(|s| s.p50_ms));
    Ok(Figures { files: args.files, freeze_ms, plain, fork, fork_by_plain, plain_written_bytes, fork_written_bytes })
}

/// Makes files of a kibibyte or so, a hundred to a folder.
async fn make_files(mut sandbox: Sandbox, n_files: u32) -> anyhow::Result<(Sandbox, ToolClient)> {
    let script = "i=0; while [ $i -lt \"$1\" ]; do d=made/$((i / 100)); [ -d $d ] || mkdir -p $d; \
                  printf '%01024d' $i > $d/$i; i=$((i + 1)); done";
    let client = ToolClient::new(sandbox.take_channel().context("the sandbox has no channel")?);
    let ran = client.exec(&ExecSpec::new(["sh", "-c", script, "sh", &n_files.to_string()]), LIMIT).await?;
    ensure!(ran.success(), "the files were not made: {}", ran.stderr.text());
    Ok((sandbox, client))
}

/// Returns how many bytes are in the writable layer of a fresh sandbox, from the counts of its file system.
async fn written(runtime: &dyn Runtime, spec: &SandboxSpec) -> anyhow::Result<u64> {
    let mut sandbox = runtime.start(spec).await?;
    let client = ToolClient::new(sandbox.take_channel().context("the sandbox has no channel")?);
    let ran = client.exec(&ExecSpec::new(["stat", "-f", "-c", "%b %f %S", "/"]), LIMIT).await?;
    sandbox.shutdown(GRACE).await?;
    let text = ran.stdout.text();
    let mut numbers = text.split_whitespace().map_while(|word| word.parse::<u64>().ok());
    let mut next = || numbers.next().context("stat told no counts");
    let (all, free, size) = (next()?, next()?, next()?);
    Ok((all - free) * size)
}
