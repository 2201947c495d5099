//! Files as text: what their bytes say, and how the same file is written again with another text.

/// How a text is written as bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    Utf8,
    Utf8Bom,
    Utf16Le,
    Utf16Be,
    /// One byte for each character, as every file can be read that is nothing else. What the bytes above 127 mean may be wrong,
    /// but they are written again as they were.
    Latin1,
}

/// How the lines of a text end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Endings {
    /// With `\n`, or there are none.
    Lf,
    /// All with `\r\n`. Such a text is held with `\n` alone, so that the agent need not know.
    CrLf,
    /// So many with `\r\n`, and others without. Such a text is held as it is.
    Mixed { n_crlf: usize },
}

/// A file's text and all that is needed to write it again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Text {
    pub(super) content: String,
    pub(super) encoding: Encoding,
    pub(super) endings: Endings,
}

const UTF8_BOM: &[u8] = b"\xef\xbb\xbf";
const UTF16_LE_BOM: &[u8] = b"\xff\xfe";
const UTF16_BE_BOM: &[u8] = b"\xfe\xff";

/// Says what bytes are that are no text.
const BINARY: &str = "a binary file";

impl Text {
    /// Reads bytes as text.
    ///
    /// # Errors
    /// What they are instead.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        let (encoding, text) = if let Some(rest) = bytes.strip_prefix(UTF16_LE_BOM) {
            (Encoding::Utf16Le, utf16(rest, u16::from_le_bytes)?)
        } else if let Some(rest) = bytes.strip_prefix(UTF16_BE_BOM) {
            (Encoding::Utf16Be, utf16(rest, u16::from_be_bytes)?)
        } else if let Some(rest) = bytes.strip_prefix(UTF8_BOM).and_then(|rest| str::from_utf8(rest).ok()) {
            (Encoding::Utf8Bom, rest.to_owned())
        } else if let Ok(text) = str::from_utf8(bytes) {
            (Encoding::Utf8, text.to_owned())
        } else if bytes.iter().any(|byte| is_binary(*byte)) {
            return Err(BINARY);
        } else {
            (Encoding::Latin1, bytes.iter().copied().map(char::from).collect())
        };
        if text.contains('\0') {
            return Err(BINARY);
        }
        let (n_lf, n_crlf) = (text.matches('\n').count(), text.matches("\r\n").count());
        Ok(match n_crlf {
            0 => Self { content: text, encoding, endings: Endings::Lf },
            _ if n_crlf == n_lf => Self { content: text.replace("\r\n", "\n"), encoding, endings: Endings::CrLf },
            _ => Self { content: text, encoding, endings: Endings::Mixed { n_crlf } },
        })
    }

    /// Returns what an agent means by a piece of this text, in the form in which the text is held.
    pub(super) fn piece(&self, piece: &str) -> String {
        if self.endings == Endings::CrLf { piece.replace("\r\n", "\n") } else { piece.to_owned() }
    }

    /// Writes another text as this one was written.
    ///
    /// # Errors
    /// The first character that this encoding does not have.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u8>, char> {
        let with_ends;
        let text = if self.endings == Endings::CrLf {
            with_ends = text.replace('\n', "\r\n");
            &with_ends
        } else {
            text
        };
        Ok(match self.encoding {
            Encoding::Utf8 => text.as_bytes().to_vec(),
            Encoding::Utf8Bom => [UTF8_BOM, text.as_bytes()].concat(),
            Encoding::Utf16Le => {
                UTF16_LE_BOM.iter().copied().chain(text.encode_utf16().flat_map(u16::to_le_bytes)).collect()
            }
            Encoding::Utf16Be => {
                UTF16_BE_BOM.iter().copied().chain(text.encode_utf16().flat_map(u16::to_be_bytes)).collect()
            }
            Encoding::Latin1 => {
                text.chars().map(|char| u8::try_from(char).map_err(|_| char)).collect::<Result<_, _>>()?
            }
        })
    }
}

fn utf16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> Result<String, &'static str> {
    let (units, rest) = bytes.as_chunks::<2>();
    let text: Result<String, _> = char::decode_utf16(units.iter().map(|pair| unit(*pair))).collect();
    text.ok().filter(|_| rest.is_empty()).ok_or(BINARY)
}

/// Tells whether no text in a one-byte encoding has this byte.
fn is_binary(byte: u8) -> bool {
    byte.is_ascii_control() && !matches!(byte, b'\t' | b'\n' | b'\r' | b'\x0c' | b'\x08' | b'\x1b')
}

/// Returns the lines of a text without their `\n`. A text that ends with one has no empty line behind it.
pub(super) fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.split_terminator('\n')
}

/// Returns the number of the line, from 1, that the byte at this offset is in.
pub(super) fn line_at(text: &str, offset: usize) -> usize {
    text[..offset].matches('\n').count() + 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decoded(bytes: &[u8]) -> (Encoding, Endings, String) {
        let Text { content, encoding, endings } = Text::decode(bytes).unwrap();
        (encoding, endings, content)
    }

    #[test]
    fn encodings_and_line_ends_are_told_apart() {
        let lf = Endings::Lf;
        assert_eq!(decoded(b""), (Encoding::Utf8, lf, String::new()));
        assert_eq!(decoded("ä\n".as_bytes()), (Encoding::Utf8, lf, "ä\n".to_owned()));
        assert_eq!(decoded(b"\xef\xbb\xbfa\r\nb\r\n"), (Encoding::Utf8Bom, Endings::CrLf, "a\nb\n".to_owned()));
        assert_eq!(decoded(b"a\r\nb\n"), (Encoding::Utf8, Endings::Mixed { n_crlf: 1 }, "a\r\nb\n".to_owned()));
        assert_eq!(decoded(b"\xff\xfea\0\r\0\n\0"), (Encoding::Utf16Le, Endings::CrLf, "a\n".to_owned()));
        assert_eq!(decoded(b"\xfe\xff\0a\xd8\x3d\xde\x00"), (Encoding::Utf16Be, lf, "a\u{1f600}".to_owned()));
        assert_eq!(decoded(b"caf\xe9"), (Encoding::Latin1, lf, "caf\u{e9}".to_owned()));
    }

    #[test]
    fn what_is_no_text_is_refused() {
        for bytes in [&b"a\0b"[..], b"\xff\xfea", b"\xff\xfe\0\xd8", b"\xff\xfe\0\0a\0\0\0", b"\x89PNG\x01\xff"] {
            assert_eq!(Text::decode(bytes), Err(BINARY), "{bytes:?}");
        }
    }

    #[test]
    fn a_character_that_the_encoding_has_not_is_named() {
        let text = Text::decode(b"caf\xe9").unwrap();
        assert_eq!(text.encode("caf\u{e9} \u{20ac}"), Err('\u{20ac}'));
        assert_eq!(text.encode("\u{fc}").unwrap(), b"\xfc");
    }

    #[test]
    fn lines_are_counted_as_an_editor_counts_them() {
        assert_eq!([lines("").count(), lines("a").count(), lines("a\n").count(), lines("a\n\n").count()], [0, 1, 1, 2]);
        assert_eq!([line_at("a\nb\n", 0), line_at("a\nb\n", 1), line_at("a\nb\n", 2)], [1, 1, 2]);
    }

    proptest! {
        #[test]
        fn bytes_come_back_as_they_were(
            bytes in proptest::collection::vec(
                prop_oneof![Just(b'\r'), Just(b'\n'), Just(0xff), Just(0xfe), Just(b'a'), any::<u8>()], 0..40,
            ),
            bom in prop_oneof![Just(&b""[..]), Just(UTF8_BOM), Just(UTF16_LE_BOM), Just(UTF16_BE_BOM)],
        ) {
            let bytes = [bom, &bytes].concat();
            if let Ok(text) = Text::decode(&bytes) {
                prop_assert_eq!(text.encode(&text.content), Ok(bytes));
            }
        }
    }
}
