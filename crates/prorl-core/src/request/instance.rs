//! The task data of a job, and what all handlers read of it.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use super::{Limits, Malformed, kind_of};
use crate::NetworkChoice;

/// The task data of a job. Its fields are the task's own; a few are common to all handlers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Instance(pub Map<String, Value>);

/// The handler that an instance without `data_source` asks for, as in the original server.
pub const DEFAULT_DATA_SOURCE: &str = "swebench";

/// The runtime that an instance asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RuntimeChoice {
    /// The server's default.
    #[default]
    Auto,
    /// The embedded one.
    Namespace,
    /// Apptainer or Singularity.
    Singularity,
}

/// The fields of an instance that every handler shares.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct CommonFields {
    /// Image path or name in the store.
    pub image: Option<String>,
    /// Runtime.
    pub runtime: RuntimeChoice,
    /// Whether user 0 inside is wanted.
    pub fakeroot: bool,
    /// Resource limits.
    pub limits: Limits,
    /// Network.
    pub network: NetworkChoice,
    /// Names of the tools to offer instead of the handler's.
    pub tools: Option<Vec<String>>,
    /// The system prompt instead of the handler's.
    pub system_prompt: Option<String>,
}

impl Instance {
    /// Returns a field.
    pub fn get(&self, field: &str) -> Option<&Value> {
        self.0.get(field)
    }

    /// Returns `data_source`, or the original's default when it is absent.
    ///
    /// # Errors
    /// When it is there and no text.
    pub fn data_source(&self) -> Result<&str, Malformed> {
        match self.0.get("data_source") {
            None | Some(Value::Null) => Ok(DEFAULT_DATA_SOURCE),
            Some(Value::String(name)) => Ok(name),
            Some(other) => Err(Malformed::new("data_source", format!("expected text, found {}", kind_of(other)))),
        }
    }

    /// Returns an id field, as text; numbers are written out.
    ///
    /// # Errors
    /// When it is neither text nor a number.
    pub fn id(&self, field: &str) -> Result<Option<String>, Malformed> {
        match self.0.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(id)) => Ok(Some(id.clone())),
            Some(Value::Number(id)) => Ok(Some(id.to_string())),
            Some(other) => Err(Malformed::new(field, format!("expected text or a number, found {}", kind_of(other)))),
        }
    }

    /// Returns the fields that every handler shares.
    ///
    /// # Errors
    /// Names the field that has another type or an impossible value.
    pub fn common(&self) -> Result<CommonFields, Malformed> {
        Ok(CommonFields {
            image: self.common_field("image")?,
            runtime: self.common_field("runtime")?,
            fakeroot: self.common_field("fakeroot")?,
            // These name the part of them that is wrong.
            limits: self.0.get("limits").map_or_else(|| Ok(Limits::default()), Limits::parse)?,
            network: self.0.get("network").map_or_else(|| Ok(NetworkChoice::default()), NetworkChoice::parse)?,
            tools: self.common_field("tools")?,
            system_prompt: self.common_field("system_prompt")?,
        })
    }

    /// Reads one field by itself, so that the error can name it; null is its default.
    fn common_field<T: DeserializeOwned + Default>(&self, field: &str) -> Result<T, Malformed> {
        let Some(value) = self.0.get(field).filter(|value| !value.is_null()) else { return Ok(T::default()) };
        T::deserialize(value).map_err(|err| Malformed::new(field, err.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn common_instance_fields_are_checked_by_name() {
        let common = |fields: Value| Instance(fields.as_object().unwrap().clone()).common();
        assert_eq!(common(json!({"runtime": "namespace", "image": null})).unwrap().runtime, RuntimeChoice::Namespace);
        for (fields, name) in [
            (json!({"runtime": "docker"}), "runtime"),
            (json!({"fakeroot": "yes"}), "fakeroot"),
            (json!({"limits": {"memory_mb": 0}}), "limits.memory_mb"),
            (json!({"limits": {"cpus": -1.0}}), "limits.cpus"),
            (json!({"limits": {"memory": 5}}), "limits.memory"),
            (json!({"limits": {"pids": "many"}}), "limits.pids"),
            (json!({"limits": {"disk_mb": -5}}), "limits.disk_mb"),
            (json!({"limits": {"file_mb": 1.5}}), "limits.file_mb"),
            (json!({"limits": {"tmp_mb": u64::MAX}}), "limits.tmp_mb"),
            (json!({"limits": {"wall_s": [1]}}), "limits.wall_s"),
            (json!({"limits": {"output_chars": 10}}), "limits.output_chars"),
            (json!({"limits": [1]}), "limits"),
            (json!({"network": "allow"}), "network"),
            (json!({"network": {"run": "host"}}), "network.run"),
            (json!({"tools": "bash"}), "tools"),
            (json!({"image": 5}), "image"),
        ] {
            assert_eq!(common(fields.clone()).unwrap_err().field, name, "{fields}");
        }
    }
}
