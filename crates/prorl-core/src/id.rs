//! Ids, parsed once at the edge.

use std::{borrow::Borrow, fmt};

use serde::{Deserialize, Serialize};

/// The number of the checkpoint that a backend serves, as add or swap gave it.
pub type WeightVersion = u64;

/// An id that does not have the form it must have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{value:?} is no {kind}: expected 1 to 128 of A-Za-z0-9._:- starting with a letter or digit")]
pub struct InvalidId {
    kind: &'static str,
    value: String,
}

fn check(kind: &'static str, value: String) -> Result<String, InvalidId> {
    let mut bytes = value.bytes();
    let starts_well = bytes.next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if starts_well
        && value.len() <= 128
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b':' | b'-'))
    {
        Ok(value)
    } else {
        let value = value.chars().take(140).collect();
        Err(InvalidId { kind, value })
    }
}

macro_rules! id_type {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Checks the form of `value` and makes an id of it.
            ///
            /// # Errors
            /// [`InvalidId`] unless it is 1 to 128 bytes of `[A-Za-z0-9._:-]` starting with a letter or digit.
            pub fn new(value: impl Into<String>) -> Result<Self, InvalidId> {
                check($kind, value.into()).map(Self)
            }

            /// Returns the id as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(value: String) -> Result<Self, InvalidId> {
                Self::new(value)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }
    };
}

id_type! {
    /// Names one rollout request. Never part of a path or a command line.
    JobId, "job id"
}
id_type! {
    /// Names the jobs that share one prompt (GRPO, DAPO).
    GroupId, "group id"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_take_the_allowed_characters_only() {
        for good in ["a", "0", "job-1", "a:b.c_d-E", &"x".repeat(128)] {
            assert_eq!(JobId::new(good).unwrap().as_str(), good);
        }
        for bad in ["", "-a", ".a", "_a", ":a", "a/b", "a b", "ä", "a\n", "a\0", &"x".repeat(129)] {
            assert!(JobId::new(bad).is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn a_bad_id_in_json_names_what_was_expected() {
        let err = serde_json::from_str::<JobId>("\"../etc\"").unwrap_err().to_string();
        assert!(err.contains("\"../etc\" is no job id") && err.contains("A-Za-z0-9._:-"), "{err}");
    }
}
