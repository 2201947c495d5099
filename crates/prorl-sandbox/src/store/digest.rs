use serde::{Deserialize, Serialize};

/// The SHA-256 of an image's content, written `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

/// A text that is no [`Digest`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected sha256: and 64 hexadecimal digits, found {0:?}")]
pub struct InvalidDigest(String);

/// How the only algorithm is named.
const PREFIX: &str = "sha256:";

impl Digest {
    /// Makes one from the hash itself.
    pub fn from_bytes(hash: [u8; 32]) -> Self {
        use std::fmt::Write as _;
        let mut text = PREFIX.to_owned();
        for byte in hash {
            write!(text, "{byte:02x}").expect("a text takes what is written to it");
        }
        Self(text)
    }

    /// Returns the digits alone, which are a plain file name.
    pub fn hex(&self) -> &str {
        &self.0[PREFIX.len()..]
    }

    /// Returns it as written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for Digest {
    type Error = InvalidDigest;

    fn try_from(text: String) -> Result<Self, InvalidDigest> {
        let is_hex = |digits: &str| {
            digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
        };
        if text.strip_prefix(PREFIX).is_some_and(is_hex) { Ok(Self(text)) } else { Err(InvalidDigest(text)) }
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_one_algorithm_and_lower_case() {
        let digest = Digest::from_bytes([0xab; 32]);
        assert_eq!(digest.as_str(), format!("sha256:{}", "ab".repeat(32)));
        assert_eq!(Digest::try_from(digest.to_string()).unwrap(), digest);
        let hex = "ab".repeat(32);
        for wrong in [hex.clone(), format!("sha512:{hex}"), format!("sha256:{}", hex.to_uppercase()), "sha256:".into()]
        {
            assert!(Digest::try_from(wrong.clone()).is_err(), "{wrong}");
        }
    }
}
