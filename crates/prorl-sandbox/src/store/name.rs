use serde::{Deserialize, Serialize};

/// What an image of a store is called by people: 1 to 200 of letters, digits and `._-/:@+`, beginning with a letter or digit,
/// no empty, `.` or `..` part between slashes. `host` is taken.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageName(String);

/// A text that is no [`ImageName`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no name of an image: expected 1 to 200 letters, digits and ._-/:@+, beginning with a letter or digit"
)]
pub struct InvalidImageName(String);

/// Longest name, in bytes.
const MAX_LEN: usize = 200;

impl ImageName {
    /// Returns it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for ImageName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for ImageName {
    type Error = InvalidImageName;

    fn try_from(text: String) -> Result<Self, InvalidImageName> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/:@+".contains(&byte);
        let is_good = (1..=MAX_LEN).contains(&text.len())
            && text.as_bytes()[0].is_ascii_alphanumeric()
            && text.bytes().all(is_plain)
            && text.split('/').all(|part| !matches!(part, "" | "." | ".."))
            && !text.contains("://")
            && text != "host";
        if is_good { Ok(Self(text)) } else { Err(InvalidImageName(text)) }
    }
}

impl From<ImageName> for String {
    fn from(name: ImageName) -> Self {
        name.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_climb_or_be_taken_for_something_else() {
        for good in ["python", "swe/django:4.2", "library/busybox@sha256", "a+b_c-1.0"] {
            assert!(ImageName::try_from(good.to_owned()).is_ok(), "{good}");
        }
        for wrong in ["", "host", "/etc", "a/../b", "a//b", "../x", ".hidden", "a b", "docker://x", "a\n", "ü"] {
            assert!(ImageName::try_from(wrong.to_owned()).is_err(), "{wrong}");
        }
        assert!(ImageName::try_from("a".repeat(201)).is_err());
    }
}
