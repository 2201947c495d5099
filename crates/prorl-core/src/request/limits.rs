//! What the sandbox of an instance may use, as its field `limits` says.

use serde::{Deserialize, Deserializer, Serialize, de::Error as _};
use serde_json::Value;

use super::{Malformed, kind_of};

/// Resource limits of an instance's sandbox; absent ones are the handler's default.
///
/// In JSON null is an absent one. Of a name that an object has twice the last counts, as everywhere in a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Limits {
    /// Memory of all processes together, MiB.
    pub memory_mb: Option<u64>,
    /// Processes and threads.
    pub pids: Option<u64>,
    /// Processors.
    pub cpus: Option<f64>,
    /// Writable layer, MiB.
    pub disk_mb: Option<u64>,
    /// `/tmp`, and `/dev/shm` by itself, MiB.
    pub tmp_mb: Option<u64>,
    /// How long the sandbox's processes may run, seconds since it started.
    pub wall_s: Option<f64>,
    /// Files that one process may have open.
    pub open_files: Option<u64>,
    /// Size of one file, MiB.
    pub file_mb: Option<u64>,
    /// Characters of one tool result.
    pub output_chars: Option<u64>,
}

impl Limits {
    /// The longest [`wall_s`](Self::wall_s), in seconds: a hundred years, which every clock on the way can hold.
    pub const MAX_WALL_S: f64 = 3_153_600_000.0;

    /// The largest size, in MiB: more cannot be counted in bytes.
    pub const MAX_MIB: u64 = u64::MAX >> 20;

    /// The fewest [`output_chars`](Self::output_chars), which hold what is told about an output.
    pub const MIN_OUTPUT_CHARS: u64 = 1000;

    /// The most [`output_chars`](Self::output_chars): more than this of an output is never kept.
    pub const MAX_OUTPUT_CHARS: u64 = 100_000;

    /// Reads the field `limits` of an instance. What the machine has is not known here.
    ///
    /// # Errors
    /// Names the limit that is wrong, beginning with `limits`, what was expected and what came.
    pub fn parse(value: &Value) -> Result<Self, Malformed> {
        let fields = match value {
            Value::Null => return Ok(Self::default()),
            Value::Object(fields) => fields,
            other => return Err(Malformed::new("limits", format!("expected an object, found {}", kind_of(other)))),
        };
        let mut limits = Self::default();
        for (name, value) in fields {
            let field = Field { name, value };
            match name.as_str() {
                "memory_mb" => limits.memory_mb = field.whole(Self::MAX_MIB)?,
                "pids" => limits.pids = field.whole(u64::from(u32::MAX))?,
                "cpus" => limits.cpus = field.number(f64::MAX)?,
                "disk_mb" => limits.disk_mb = field.whole(Self::MAX_MIB)?,
                "tmp_mb" => limits.tmp_mb = field.whole(Self::MAX_MIB)?,
                "wall_s" => limits.wall_s = field.number(Self::MAX_WALL_S)?,
                "open_files" => limits.open_files = field.whole(u64::MAX)?,
                "file_mb" => limits.file_mb = field.whole(Self::MAX_MIB)?,
                "output_chars" => {
                    limits.output_chars = field.whole_from(Self::MIN_OUTPUT_CHARS, Self::MAX_OUTPUT_CHARS)?;
                }
                _ => {
                    let known = "memory_mb, pids, cpus, disk_mb, tmp_mb, wall_s, open_files, file_mb, output_chars";
                    return Err(Malformed::new(format!("limits.{name}"), format!("no such limit; known are {known}")));
                }
            }
        }
        Ok(limits)
    }
}

impl<'de> Deserialize<'de> for Limits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&Value::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

/// One limit as the request has it.
struct Field<'a> {
    name: &'a str,
    value: &'a Value,
}

impl Field<'_> {
    /// Reads a whole number above 0; null is none.
    fn whole(&self, most: u64) -> Result<Option<u64>, Malformed> {
        self.read(
            Value::as_u64,
            |number| (1..=most).contains(number),
            || {
                // The largest number of all is worth telling only to who went beyond it.
                if self.value.as_f64().is_some_and(|number| number >= most as f64) {
                    format!("a whole number of at most {most}")
                } else {
                    "a whole number above 0".to_owned()
                }
            },
        )
    }

    /// Reads a whole number of a range; null is none.
    fn whole_from(&self, least: u64, most: u64) -> Result<Option<u64>, Malformed> {
        let expected = || format!("a whole number from {least} to {most}");
        self.read(Value::as_u64, |number| (least..=most).contains(number), expected)
    }

    /// Reads a number above 0; null is none.
    fn number(&self, most: f64) -> Result<Option<f64>, Malformed> {
        let expected = || {
            if most < f64::MAX { format!("a number above 0 and at most {most}") } else { "a number above 0".to_owned() }
        };
        self.read(Value::as_f64, |number| *number > 0.0 && *number <= most, expected)
    }

    fn read<T>(
        &self,
        read: impl FnOnce(&Value) -> Option<T>,
        is_right: impl FnOnce(&T) -> bool,
        expected: impl FnOnce() -> String,
    ) -> Result<Option<T>, Malformed> {
        if self.value.is_null() {
            return Ok(None);
        }
        if let Some(found) = read(self.value).filter(is_right) {
            return Ok(Some(found));
        }
        let problem = format!("expected {}, found {}", expected(), shown(self.value));
        Err(Malformed::new(format!("limits.{}", self.name), problem))
    }
}

/// The longest text that an error repeats, in bytes.
const MAX_SHOWN: usize = 40;

/// A number or a short text as it is, or the kind of what is neither.
fn shown(value: &Value) -> String {
    match value {
        Value::Number(number) => number.to_string(),
        Value::String(text) if text.len() <= MAX_SHOWN => format!("the text {text:?}"),
        other => kind_of(other).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn limits_are_numbers_and_null_is_none() {
        let given = Limits::parse(&json!({"memory_mb": 512, "cpus": 0.5, "pids": null})).unwrap();
        assert_eq!(given, Limits { memory_mb: Some(512), cpus: Some(0.5), ..Limits::default() });
        assert_eq!(Limits::parse(&Value::Null).unwrap(), Limits::default());
        let most = json!({
            "memory_mb": Limits::MAX_MIB, "pids": u32::MAX, "open_files": u64::MAX, "wall_s": Limits::MAX_WALL_S,
            "output_chars": 100_000,
        });
        let most = Limits::parse(&most).unwrap();
        assert_eq!((most.open_files, most.wall_s), (Some(u64::MAX), Some(3_153_600_000.0)));
        assert_eq!(serde_json::from_value::<Limits>(json!(most)).unwrap(), most);
    }

    #[test]
    fn of_a_name_that_is_given_twice_the_last_counts() {
        let twice: Limits = serde_json::from_str(r#"{"pids": 5, "pids": 7}"#).unwrap();
        assert_eq!(twice.pids, Some(7));
    }

    #[test]
    fn wrong_limits_are_named_with_what_was_expected_and_what_came() {
        let whole = "a whole number above 0";
        let known = "memory_mb, pids, cpus, disk_mb, tmp_mb, wall_s, open_files, file_mb, output_chars";
        let mut cases = vec![
            (json!({"ram": 1}), format!("limits.ram: no such limit; known are {known}")),
            (json!({"memory": 1}), format!("limits.memory: no such limit; known are {known}")),
            (json!({"": 1}), format!("limits.: no such limit; known are {known}")),
            (json!(5), "limits: expected an object, found a number".to_owned()),
            (json!([1]), "limits: expected an object, found a list".to_owned()),
            (json!("none"), "limits: expected an object, found a string".to_owned()),
        ];
        for name in ["memory_mb", "pids", "disk_mb", "tmp_mb", "open_files", "file_mb"] {
            let most = match name {
                "pids" => u64::from(u32::MAX),
                "open_files" => u64::MAX,
                _ => 17_592_186_044_415,
            };
            for (value, expected, found) in [
                (json!(0), whole, "0"),
                (json!(-1), whole, "-1"),
                (json!(1.5), whole, "1.5"),
                (json!("512"), whole, "the text \"512\""),
                (json!("NaN"), whole, "the text \"NaN\""),
                (json!("x".repeat(41)), whole, "a string"),
                (json!(true), whole, "a boolean"),
                (json!([1]), whole, "a list"),
                (json!({}), whole, "an object"),
                (json!(1e300), &format!("a whole number of at most {most}"), "1e+300"),
                (json!(-1e300), whole, "-1e+300"),
            ] {
                cases.push((json!({name: value}), format!("limits.{name}: expected {expected}, found {found}")));
            }
        }
        for (name, expected) in [("cpus", "a number above 0"), ("wall_s", "a number above 0 and at most 3153600000")] {
            for (value, found) in [
                (json!(0), "0"),
                (json!(-0.0), "-0.0"),
                (json!(-0.5), "-0.5"),
                (json!("1h"), "the text \"1h\""),
                (json!("Infinity"), "the text \"Infinity\""),
                (json!([1]), "a list"),
            ] {
                cases.push((json!({name: value}), format!("limits.{name}: expected {expected}, found {found}")));
            }
        }
        cases.push((
            json!({"wall_s": 1e300}),
            "limits.wall_s: expected a number above 0 and at most 3153600000, found 1e+300".to_owned(),
        ));
        for (value, found) in [(json!(999), "999"), (json!(100_001), "100001"), (json!("many"), "the text \"many\"")] {
            let said = format!("limits.output_chars: expected a whole number from 1000 to 100000, found {found}");
            cases.push((json!({"output_chars": value}), said));
        }
        for (limits, said) in cases {
            assert_eq!(Limits::parse(&limits).unwrap_err().to_string(), said, "{limits}");
            let by_serde = serde_json::from_value::<Limits>(limits).unwrap_err().to_string();
            assert_eq!(by_serde, said, "there is one way to read them");
        }
    }
}
