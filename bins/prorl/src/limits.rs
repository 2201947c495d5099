//! What sandboxes may use, as flags.

use std::num::IntErrorKind;

use anyhow::{anyhow, bail};
use clap::Args;
use prorl_agents::SandboxDefaults;
use prorl_core::{Malformed, request::Limits};
use serde_json::{Map, Value, json};

use crate::config::Layers;

/// The limits of one sandbox.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct LimitArgs {
    /// Memory of all processes of a sandbox together, in MiB [default: 4096, or the whole of a smaller machine's].
    #[arg(long, env = "PRORL_MEMORY_MB", value_name = "N", value_parser = mib)]
    memory_mb: Option<u64>,
    /// Processes and threads of a sandbox together [default: 1024].
    #[arg(long, env = "PRORL_PIDS", value_name = "N", value_parser = pids)]
    pids: Option<u64>,
    /// Processors of a sandbox, such as 2; a part of one, such as 0.5, is held where control groups are delegated and counts as
    /// a whole one elsewhere [default: all that prorl may use].
    #[arg(long, env = "PRORL_CPUS", value_name = "N", value_parser = cpus)]
    cpus: Option<f64>,
    /// Size of all that a sandbox can write outside of /tmp and /dev/shm, in MiB. It is memory, beside that of --memory-mb
    /// [default: 2048].
    #[arg(long, env = "PRORL_DISK_MB", value_name = "N", value_parser = mib)]
    disk_mb: Option<u64>,
    /// Size of /tmp of a sandbox, and of its /dev/shm by itself, in MiB. They are memory too [default: 512].
    #[arg(long, env = "PRORL_TMP_MB", value_name = "N", value_parser = mib)]
    tmp_mb: Option<u64>,
    /// Files that one process of a sandbox may have open, 64 or more: its hard limit. Its soft one, up to which most programs
    /// go, begins at 4096 where this is more [default: three quarters of prorl's own, see `ulimit -Hn`].
    #[arg(long, env = "PRORL_OPEN_FILES", value_name = "N", value_parser = open_files)]
    open_files: Option<u64>,
    /// Size of one file in a sandbox, in MiB [default: that of its disk].
    #[arg(long, env = "PRORL_FILE_MB", value_name = "N", value_parser = mib)]
    file_mb: Option<u64>,
}

impl LimitArgs {
    /// Returns them as an instance would ask for them.
    fn asked(&self) -> Limits {
        let Self { memory_mb, pids, cpus, disk_mb, tmp_mb, open_files, file_mb } = *self;
        Limits { memory_mb, pids, cpus, disk_mb, tmp_mb, open_files, file_mb, ..Limits::default() }
    }

    /// Returns what the sandbox of one command may use.
    ///
    /// # Errors
    /// Names the flag of a limit that cannot be held here.
    pub(crate) fn settle(&self) -> anyhow::Result<SandboxDefaults> {
        let limits = SandboxDefaults::default().with(&self.asked());
        limits.check().map_err(|problem| anyhow!("--{}: {}", key_of(&problem).replace('_', "-"), problem.problem))?;
        Ok(limits)
    }
}

/// The limits of a server's sandboxes.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Limits of sandboxes, where an instance does not set its own")]
pub(crate) struct ServedLimits {
    #[command(flatten)]
    common: LimitArgs,
    /// How long the processes of a sandbox may run, counted from its start, in seconds [default: as long as their job].
    #[arg(long, env = "PRORL_WALL_S", value_name = "SECONDS", value_parser = wall)]
    wall_s: Option<f64>,
    /// Characters of one tool result that the agent reads, from 1000 to 100000 [default: 30000].
    #[arg(long, env = "PRORL_OUTPUT_CHARS", value_name = "N", value_parser = output_chars)]
    output_chars: Option<u64>,
}

/// Keys of the limits in a configuration file, which are also their names in an instance.
const KEYS: [&str; 9] =
    ["memory_mb", "pids", "cpus", "disk_mb", "tmp_mb", "wall_s", "open_files", "file_mb", "output_chars"];

impl ServedLimits {
    /// Decides them.
    ///
    /// # Errors
    /// Names a limit that is wrong, or that cannot be held here, as it was given: by its flag, its variable or its key.
    pub(crate) fn settle(self, layers: &mut Layers<'_>) -> anyhow::Result<SandboxDefaults> {
        let Self { common, wall_s, output_chars } = self;
        let given = json!(Limits { wall_s, output_chars, ..common.asked() });
        let defaults = SandboxDefaults::default();
        let default_values = json!(defaults.asked());
        let mut asked = Map::new();
        for key in KEYS {
            let given = Some(given[key].clone()).filter(|given| !given.is_null());
            let value = match &default_values[key] {
                Value::Null => layers.optional(key, given)?,
                default => Some(layers.or(key, given, default.clone())?),
            };
            // What has no default, or a default that is no whole number of mebibytes, is left to the defaults themselves.
            let Some(value) = value.filter(|_| layers.is_given(key)) else { continue };
            if value.is_null() {
                // A file can hold nan and inf, which become this.
                bail!("{}: expected a finite number, found nan or inf", layers.name(key));
            }
            let alone = json!({key: value});
            Limits::parse(&alone).map_err(|problem| named(layers, &problem))?;
            asked.insert(key.to_owned(), value);
        }
        let asked = Limits::parse(&Value::Object(asked)).map_err(|problem| named(layers, &problem))?;
        let limits = defaults.with(&asked);
        limits.check().map_err(|problem| named(layers, &problem))?;
        Ok(limits)
    }
}

/// Returns the key of the limit that a problem is about.
fn key_of(problem: &Malformed) -> &str {
    problem.field.strip_prefix("limits.").unwrap_or(&problem.field)
}

/// Tells what is wrong with a limit, which is named as it was given.
fn named(layers: &Layers<'_>, problem: &Malformed) -> anyhow::Error {
    anyhow!("{}: {}", layers.name(key_of(problem)), problem.problem)
}

fn mib(text: &str) -> Result<u64, String> {
    whole(text, 1, Limits::MAX_MIB)
}

/// Reads how much is to stay free, in MiB, which may be nothing.
pub(crate) fn free_mib(text: &str) -> Result<u64, String> {
    whole(text, 0, Limits::MAX_MIB)
}

fn pids(text: &str) -> Result<u64, String> {
    whole(text, 1, u64::from(u32::MAX))
}

fn open_files(text: &str) -> Result<u64, String> {
    whole(text, 1, u64::MAX)
}

fn output_chars(text: &str) -> Result<u64, String> {
    let (least, most) = (Limits::MIN_OUTPUT_CHARS, Limits::MAX_OUTPUT_CHARS);
    whole(text, least, most).map_err(|_| format!("expected a whole number from {least} to {most}"))
}

/// Reads a whole number; the error says what was expected, and the parser of flags what came.
fn whole(text: &str, least: u64, most: u64) -> Result<u64, String> {
    let parsed = text.parse::<u64>();
    let is_too_large = match &parsed {
        Ok(number) => *number > most,
        Err(error) => *error.kind() == IntErrorKind::PosOverflow,
    };
    match parsed {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        // The largest number of all is worth telling only to who went beyond it.
        _ if is_too_large => Err(format!("expected a whole number of at most {most}")),
        _ if least == 0 => Err("expected a whole number of 0 or more".to_owned()),
        _ => Err("expected a whole number above 0".to_owned()),
    }
}

fn cpus(text: &str) -> Result<f64, String> {
    let cpus = text.parse().ok().filter(|cpus: &f64| cpus.is_finite() && *cpus > 0.0);
    cpus.ok_or_else(|| "expected a number above 0".to_owned())
}

fn wall(text: &str) -> Result<f64, String> {
    let most = Limits::MAX_WALL_S;
    let wall = text.parse().ok().filter(|wall: &f64| *wall > 0.0 && *wall <= most);
    wall.ok_or_else(|| format!("expected seconds above 0 and at most {most}"))
}
