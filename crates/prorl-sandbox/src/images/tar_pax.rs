//! What the extended headers of POSIX say about an entry of a tar.

use std::io;

use super::tar_stream::{Piece, invalid};

/// The records that mean something here.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Records {
    pub(super) path: Option<Vec<u8>>,
    pub(super) target: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    /// Seconds and nanoseconds.
    pub(super) mtime: Option<(i64, u32)>,
    /// Names and values of extended attributes.
    pub(super) attributes: Vec<(Vec<u8>, Vec<u8>)>,
    pub(super) sparse: Sparse,
}

/// What is said of a sparse file, in the forms that GNU has had.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Sparse {
    /// Form 1.0: the list of pieces is in front of the data.
    pub(super) is_version_1: bool,
    pub(super) name: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    /// Forms 0.0 and 0.1: the list itself.
    pub(super) pieces: Option<Vec<Piece>>,
}

/// Most attributes of one entry. File systems take fewer.
const MAX_ATTRIBUTES: usize = 1000;

/// How the names of attributes begin.
const ATTRIBUTE: &[u8] = b"SCHILY.xattr.";

/// Reads records: `LENGTH KEY=VALUE\n`, the length being that of the whole record. A value may hold anything, line ends too.
pub(super) fn parse(mut data: &[u8], into: &mut Records) -> io::Result<()> {
    let malformed = || invalid("has a malformed extended header");
    while !data.is_empty() {
        let blank = data.iter().take(20).position(|byte| *byte == b' ').ok_or_else(malformed)?;
        let len = usize::try_from(number(&data[..blank])?).map_err(|_| malformed())?;
        if len <= blank + 1 || len > data.len() || data[len - 1] != b'\n' {
            return Err(malformed());
        }
        let (record, rest) = data.split_at(len);
        let record = &record[blank + 1..len - 1];
        let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(malformed)?;
        into.take(&record[..equals], &record[equals + 1..])?;
        data = rest;
    }
    Ok(())
}

impl Records {
    fn take(&mut self, key: &[u8], value: &[u8]) -> io::Result<()> {
        match key {
            b"path" => self.path = Some(value.to_vec()),
            b"linkpath" => self.target = Some(value.to_vec()),
            b"size" => self.size = Some(number(value)?),
            b"mtime" => self.mtime = Some(time(value)?),
            b"GNU.sparse.major" => self.sparse.is_version_1 = number(value)? == 1,
            b"GNU.sparse.name" => self.sparse.name = Some(value.to_vec()),
            b"GNU.sparse.realsize" | b"GNU.sparse.size" => self.sparse.size = Some(number(value)?),
            b"GNU.sparse.map" => self.sparse.pieces = Some(map(value)?),
            b"GNU.sparse.offset" => {
                let piece = Piece { offset: number(value)?, len: 0 };
                self.sparse.pieces.get_or_insert_default().push(piece);
            }
            b"GNU.sparse.numbytes" => {
                let last = self.sparse.pieces.as_mut().and_then(|pieces| pieces.last_mut());
                last.ok_or_else(|| invalid("has a sparse file with a wrong list of its pieces"))?.len = number(value)?;
            }
            key => {
                if let Some(name) = key.strip_prefix(ATTRIBUTE) {
                    if self.attributes.len() == MAX_ATTRIBUTES {
                        return Err(invalid("has an entry with too many extended attributes"));
                    }
                    self.attributes.push((name.to_vec(), value.to_vec()));
                }
            }
        }
        Ok(())
    }
}

fn map(value: &[u8]) -> io::Result<Vec<Piece>> {
    let numbers: Vec<u64> =
        value.split(|byte| *byte == b',').filter(|text| !text.is_empty()).map(number).collect::<io::Result<_>>()?;
    Ok(numbers.chunks_exact(2).map(|pair| Piece { offset: pair[0], len: pair[1] }).collect())
}

fn number(text: &[u8]) -> io::Result<u64> {
    let digits = str::from_utf8(text).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    digits.and_then(|text| text.parse().ok()).ok_or_else(|| invalid("has an extended header with a wrong number"))
}

/// Reads decimal seconds, which may be negative and have a fraction. What is finer than nanoseconds is cut off.
fn time(text: &[u8]) -> io::Result<(i64, u32)> {
    let wrong = || invalid("has an extended header with a wrong time");
    let text = str::from_utf8(text).map_err(|_| wrong())?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let (is_negative, digits) = whole.strip_prefix('-').map_or((false, whole), |digits| (true, digits));
    let secs = i64::try_from(number(digits.as_bytes())?).map_err(|_| wrong())?;
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(wrong());
    }
    let digit = |byte: u8| u32::from(byte - b'0');
    let nanos = (0..9).fold(0, |sum, at| sum * 10 + fraction.as_bytes().get(at).map_or(0, |byte| digit(*byte)));
    match (is_negative, nanos) {
        (false, nanos) => Ok((secs, nanos)),
        (true, 0) => Ok((-secs, 0)),
        (true, nanos) => Ok((-secs - 1, 1_000_000_000 - nanos)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(key: &str, value: &str) -> String {
        let bare = key.len() + value.len() + 3;
        let len = (1..9).map(|digits| bare + digits).find(|len| bare + len.to_string().len() == *len).unwrap();
        format!("{len} {key}={value}\n")
    }

    fn parsed(records: &[(&str, &str)]) -> io::Result<Records> {
        let text: String = records.iter().map(|(key, value)| record(key, value)).collect();
        let mut found = Records::default();
        parse(text.as_bytes(), &mut found).map(|()| found)
    }

    #[test]
    fn values_hold_line_ends_and_signs() {
        let found = parsed(&[("path", "a\nb=c"), ("SCHILY.xattr.user.x", "1\n2"), ("comment", "no")]).unwrap();
        assert_eq!(found.path.unwrap(), b"a\nb=c");
        assert_eq!(found.attributes, [(b"user.x".to_vec(), b"1\n2".to_vec())]);
    }

    #[test]
    fn times_have_fractions_and_signs() {
        for (text, time) in [
            ("12", (12, 0)),
            ("12.5", (12, 500_000_000)),
            ("12.0000000019", (12, 1)),
            ("-1.25", (-2, 750_000_000)),
            ("-3", (-3, 0)),
        ] {
            assert_eq!(parsed(&[("mtime", text)]).unwrap().mtime, Some(time), "{text}");
        }
        for wrong in ["", "x", "1.x", "99999999999999999999", "1e9"] {
            assert!(parsed(&[("mtime", wrong)]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_list_of_pieces_has_two_forms() {
        let pieces = vec![Piece { offset: 0, len: 5 }, Piece { offset: 4096, len: 1 }];
        let found = parsed(&[("GNU.sparse.map", "0,5,4096,1"), ("GNU.sparse.size", "9999")]).unwrap().sparse;
        assert_eq!(found, Sparse { size: Some(9999), pieces: Some(pieces.clone()), ..Sparse::default() });
        let pairs = [("GNU.sparse.offset", "0"), ("GNU.sparse.numbytes", "5")];
        let more = [("GNU.sparse.offset", "4096"), ("GNU.sparse.numbytes", "1")];
        assert_eq!(parsed(&[&pairs[..], &more[..]].concat()).unwrap().sparse.pieces, Some(pieces));
        assert!(parsed(&[("GNU.sparse.numbytes", "5")]).is_err());
    }

    #[test]
    fn half_records_are_refused() {
        for wrong in ["5", "5 a=b", "99 a=b\n", "0 a=b\n", "6 a=b\n\n", "3 \n", "x a=b\n", "5 ab\n"] {
            assert!(parse(wrong.as_bytes(), &mut Records::default()).is_err(), "{wrong:?}");
        }
    }
}
