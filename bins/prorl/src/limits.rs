//! What sandboxes may use, as flags.

use anyhow::{Context, bail};
use clap::{Args, value_parser};
use prorl_agents::SandboxDefaults;
use prorl_sandbox::{Limits, SandboxSpec};

use crate::config::Layers;

/// The most mebibytes that can be counted in bytes.
pub(crate) const MAX_MIB: u64 = u64::MAX >> 20;

const MIB: u64 = 1 << 20;

/// The limits of one sandbox.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct LimitArgs {
    /// Memory of all processes of a sandbox together, in MiB [default: 4096].
    #[arg(long, env = "PRORL_MEMORY_MB", value_name = "N", value_parser = value_parser!(u64).range(1..=MAX_MIB))]
    memory_mb: Option<u64>,
    /// Processes and threads of a sandbox [default: 1024].
    #[arg(long, env = "PRORL_PIDS", value_name = "N", value_parser = value_parser!(u32).range(1..))]
    pids: Option<u32>,
    /// Processors of a sandbox; parts of one need delegated control groups [default: all].
    #[arg(long, env = "PRORL_CPUS", value_name = "N", value_parser = parse_cpus)]
    cpus: Option<f64>,
    /// Size of /tmp of a sandbox, and of its /dev/shm by itself, in MiB [default: 512].
    #[arg(long, env = "PRORL_TMP_MB", value_name = "N", value_parser = value_parser!(u64).range(1..=MAX_MIB))]
    tmp_mb: Option<u64>,
    /// Files that one process of a sandbox may have open [default: as this process].
    #[arg(long, env = "PRORL_OPEN_FILES", value_name = "N", value_parser = value_parser!(u64).range(1..))]
    open_files: Option<u64>,
    /// Size of one file in a sandbox, in MiB [default: that of its disk].
    #[arg(long, env = "PRORL_FILE_MB", value_name = "N", value_parser = value_parser!(u64).range(1..=MAX_MIB))]
    file_mb: Option<u64>,
}

fn parse_cpus(text: &str) -> Result<f64, String> {
    let cpus = text.parse().ok().filter(|cpus: &f64| cpus.is_finite() && *cpus > 0.0);
    cpus.ok_or_else(|| "expected a number above 0".to_owned())
}

impl LimitArgs {
    /// Sets the limits of one sandbox.
    pub(crate) fn apply(&self, spec: &mut SandboxSpec) {
        spec.tmp_bytes = self.tmp_mb.map_or(spec.tmp_bytes, |mib| mib * MIB);
        spec.limits = Limits {
            memory_bytes: self.memory_mb.map(|mib| mib * MIB).or(spec.limits.memory_bytes),
            pids: self.pids.or(spec.limits.pids),
            cpus: self.cpus.or(spec.limits.cpus),
            open_files: self.open_files.or(spec.limits.open_files),
            file_bytes: self.file_mb.map(|mib| mib * MIB).or(spec.limits.file_bytes),
            ..spec.limits
        };
    }
}

/// The limits of a server's sandboxes.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Limits of instances that name none")]
pub(crate) struct ServedLimits {
    #[command(flatten)]
    common: LimitArgs,
    /// Size of everything of a sandbox that can be written but /tmp and /dev/shm, in MiB [default: 2048].
    #[arg(long, env = "PRORL_DISK_MB", value_name = "N", value_parser = value_parser!(u64).range(1..=MAX_MIB))]
    disk_mb: Option<u64>,
    /// Characters of one tool result [default: 30000].
    #[arg(long, env = "PRORL_OUTPUT_CHARS", value_name = "N", value_parser = value_parser!(u32).range(1000..=100_000))]
    output_chars: Option<u32>,
}

impl ServedLimits {
    /// Decides them.
    pub(crate) fn settle(self, layers: &mut Layers<'_>) -> anyhow::Result<SandboxDefaults> {
        let Self { common, disk_mb, output_chars } = self;
        let common = LimitArgs {
            memory_mb: layers.optional("memory_mb", common.memory_mb)?,
            pids: layers.optional("pids", common.pids)?,
            cpus: layers.optional("cpus", common.cpus)?,
            tmp_mb: layers.optional("tmp_mb", common.tmp_mb)?,
            open_files: layers.optional("open_files", common.open_files)?,
            file_mb: layers.optional("file_mb", common.file_mb)?,
        };
        let disk_mb = layers.optional("disk_mb", disk_mb)?;
        let output_chars = layers.optional("output_chars", output_chars)?;
        // What a file says has passed no parser of flags.
        for (key, value) in [
            ("memory_mb", common.memory_mb),
            ("pids", common.pids.map(u64::from)),
            ("tmp_mb", common.tmp_mb),
            ("open_files", common.open_files),
            ("file_mb", common.file_mb),
            ("disk_mb", disk_mb),
        ] {
            let most = if key.ends_with("_mb") { MAX_MIB } else { u64::MAX };
            if value.is_some_and(|value| !(1..=most).contains(&value)) {
                bail!("{key}: expected a whole number above 0, found {}", value.unwrap_or_default());
            }
        }
        if let Some(cpus) = common.cpus {
            parse_cpus(&cpus.to_string()).map_err(|why| anyhow::anyhow!("cpus: {why}, found {cpus}"))?;
        }
        if output_chars.is_some_and(|chars| !(1000..=100_000).contains(&chars)) {
            bail!("output_chars: expected 1000 to 100000, found {}", output_chars.unwrap_or_default());
        }
        let mut spec = SandboxSpec::new("");
        common.apply(&mut spec);
        spec.layer_bytes = disk_mb.map_or(spec.layer_bytes, |mib| mib * MIB);
        let defaults = SandboxDefaults::default();
        let output_chars = output_chars.map(usize::try_from).transpose().context("output_chars")?;
        Ok(SandboxDefaults {
            limits: spec.limits,
            layer_bytes: spec.layer_bytes,
            tmp_bytes: spec.tmp_bytes,
            output_chars: output_chars.unwrap_or(defaults.output_chars),
        })
    }
}
