//! What sandboxes may use, between what the operator sets, what an instance asks for, and what this machine has.

use std::time::Duration;

use prorl_core::{Malformed, request::Limits as AskedLimits};
use prorl_sandbox::{Limits, SandboxError, SandboxSpec};
use prorl_tools::host::RESULT_CHARS;

const MIB: u64 = 1 << 20;

/// What a sandbox may use where its instance does not say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SandboxDefaults {
    /// Memory, processes, processors, open files, size of a file, time.
    pub limits: Limits,
    /// Size of the writable layer, in bytes.
    pub layer_bytes: u64,
    /// Size of `/tmp`, and of `/dev/shm` by itself, in bytes.
    pub tmp_bytes: u64,
    /// Characters of one tool result.
    pub output_chars: usize,
}

impl Default for SandboxDefaults {
    /// Returns those of [`SandboxSpec::new`].
    fn default() -> Self {
        let spec = SandboxSpec::new("");
        let SandboxSpec { limits, layer_bytes, tmp_bytes, .. } = spec;
        Self { limits, layer_bytes, tmp_bytes, output_chars: RESULT_CHARS }
    }
}

impl SandboxDefaults {
    /// Returns a spec with these limits.
    #[must_use]
    pub fn applied(&self, spec: SandboxSpec) -> SandboxSpec {
        let Self { limits, layer_bytes, tmp_bytes, output_chars: _ } = *self;
        SandboxSpec { limits, layer_bytes, tmp_bytes, ..spec }
    }

    /// Returns these as an instance would ask for them. A size is rounded down to whole mebibytes, to one at least.
    pub fn asked(&self) -> AskedLimits {
        let Self { limits, layer_bytes, tmp_bytes, output_chars } = *self;
        let Limits { memory_bytes, pids, cpus, open_files, file_bytes, wall } = limits;
        let mib = |bytes: u64| (bytes / MIB).max(1);
        AskedLimits {
            memory_mb: memory_bytes.map(mib),
            pids: pids.map(u64::from),
            cpus,
            disk_mb: Some(mib(layer_bytes)),
            tmp_mb: Some(mib(tmp_bytes)),
            wall_s: wall.map(|wall| wall.as_secs_f64()),
            open_files,
            file_mb: file_bytes.map(mib),
            output_chars: u64::try_from(output_chars).ok(),
        }
    }

    /// Checks each of them alone, and against what this machine has and this process may use.
    ///
    /// # Errors
    /// Names the first that cannot be held as an instance has it, such as `limits.memory_mb`.
    pub fn check(&self) -> Result<(), Malformed> {
        let checked = self.applied(SandboxSpec::new("")).check_limits();
        checked.map_err(|error| match error {
            SandboxError::Invalid { what, reason } => {
                let field = match what {
                    "limits.memory_bytes" => "limits.memory_mb",
                    "limits.file_bytes" => "limits.file_mb",
                    "limits.wall" => "limits.wall_s",
                    "layer_bytes" => "limits.disk_mb",
                    "tmp_bytes" => "limits.tmp_mb",
                    same => same,
                };
                Malformed::new(field, reason)
            }
            other => Malformed::new("limits", other.to_string()),
        })
    }

    /// Returns what an instance's sandbox may use.
    #[must_use]
    pub fn with(mut self, asked: &AskedLimits) -> Self {
        let AskedLimits { memory_mb, pids, cpus, disk_mb, tmp_mb, wall_s, open_files, file_mb, output_chars } = *asked;
        let limits = &mut self.limits;
        limits.memory_bytes = memory_mb.map(|mib| mib.saturating_mul(MIB)).or(limits.memory_bytes);
        limits.pids = pids.map(|pids| u32::try_from(pids).unwrap_or(u32::MAX)).or(limits.pids);
        limits.cpus = cpus.or(limits.cpus);
        limits.open_files = open_files.or(limits.open_files);
        limits.file_bytes = file_mb.map(|mib| mib.saturating_mul(MIB)).or(limits.file_bytes);
        // So long a time that no clock can hold it, which `AskedLimits::parse` refuses, is none.
        limits.wall = wall_s.and_then(|wall| Duration::try_from_secs_f64(wall).ok()).or(limits.wall);
        self.layer_bytes = disk_mb.map_or(self.layer_bytes, |mib| mib.saturating_mul(MIB));
        self.tmp_bytes = tmp_mb.map_or(self.tmp_bytes, |mib| mib.saturating_mul(MIB));
        self.output_chars =
            output_chars.map_or(self.output_chars, |chars| usize::try_from(chars).unwrap_or(usize::MAX));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn checked(asked: &Value) -> Result<(), String> {
        let asked = AskedLimits::parse(asked).unwrap();
        SandboxDefaults::default().with(&asked).check().map_err(|problem| problem.to_string())
    }

    #[test]
    fn limits_above_the_machine_are_named_as_an_instance_has_them_in_its_own_units() {
        assert_eq!(checked(&json!({})), Ok(()), "what is not said can be held");
        let refused = |asked: Value| checked(&asked).unwrap_err();
        let huge = 1_u64 << 40;
        for (name, expected) in [
            ("memory_mb", "(this machine's memory)"),
            ("disk_mb", "(this machine's memory, which holds what is written)"),
            ("tmp_mb", "(this machine's memory, which holds what is written)"),
        ] {
            let told = refused(json!({name: huge}));
            assert!(told.starts_with(&format!("limits.{name}: expected 1 MiB to ")), "{told}");
            assert!(told.ends_with(&format!(" MiB {expected}, found 1099511627776 MiB")), "{told}");
        }
        let told = refused(json!({"pids": u32::MAX}));
        assert!(told.starts_with("limits.pids: expected 1 to "), "{told}");
        assert!(told.ends_with(" (kernel.pid_max), found 4294967295"), "{told}");
        let told = refused(json!({"open_files": 5}));
        assert!(told.starts_with("limits.open_files: expected 64 to ") && told.ends_with("found 5"), "{told}");
        for (cpus, found) in [(json!(1_000_000), "1000000"), (json!(1e300), "1e300"), (json!(0.001), "0.001")] {
            let told = refused(json!({"cpus": cpus}));
            assert!(told.starts_with("limits.cpus: expected 0.01 to "), "{told}");
            assert!(told.ends_with(&format!(" (the processors that may be used here), found {found}")), "{told}");
        }
        // Shorter than any clock counts.
        assert_eq!(refused(json!({"wall_s": 1e-12})), "limits.wall_s: expected more than 0 s, found 0 s");
    }

    #[test]
    fn what_is_asked_for_is_what_is_told() {
        let asked = json!({
            "memory_mb": 64, "pids": 7, "cpus": 0.5, "disk_mb": 3, "tmp_mb": 2, "wall_s": 1.5, "open_files": 100,
            "file_mb": 1, "output_chars": 2000,
        });
        let limits = SandboxDefaults::default().with(&AskedLimits::parse(&asked).unwrap());
        assert_eq!(limits.check(), Ok(()));
        assert_eq!(json!(limits.asked()), asked);
        assert_eq!(SandboxDefaults::default().with(&AskedLimits::default()), SandboxDefaults::default());
    }
}
