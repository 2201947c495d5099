//! Reading parts of files: sections of an archive, checked against their digests and unpacked on the way.

use std::{
    fs::File,
    io::{self, BufRead as _, BufReader, Read},
    os::unix::fs::FileExt as _,
    sync::Arc,
};

use flate2::bufread::MultiGzDecoder;
use sha2::{Digest as _, Sha256};

use super::{Progress, tar_stream::invalid};
use crate::store::Digest;

/// How much is read from a file at a time.
const CHUNK: usize = 256 << 10;

/// A section of a file that others may read at the same time.
#[derive(Clone, Debug)]
pub(super) struct Part {
    file: Arc<File>,
    at: u64,
    end: u64,
}

impl Part {
    /// Begins at `at` and is `len` bytes long, whether the file is or not.
    pub(super) fn new(file: Arc<File>, at: u64, len: u64) -> Self {
        Self { file, at, end: at.saturating_add(len) }
    }

    /// Returns how many bytes are left.
    pub(super) fn len(&self) -> u64 {
        self.end - self.at
    }

    /// Leaves out so many bytes, which have to be there.
    pub(super) fn skip(&mut self, n_bytes: u64) -> io::Result<()> {
        if n_bytes > self.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += n_bytes;
        Ok(())
    }

    /// Reads the first bytes without moving on. There may be fewer.
    pub(super) fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut copy = self.clone();
        let mut n_read = 0;
        while n_read < buffer.len() {
            match copy.read(&mut buffer[n_read..])? {
                0 => break,
                n_more => n_read += n_more,
            }
        }
        Ok(n_read)
    }

    /// Reads all of it, as long as it is not more than `max` bytes.
    pub(super) fn read_whole(mut self, max: u64) -> io::Result<Vec<u8>> {
        if self.len() > max {
            return Err(invalid(format!("is of {} bytes, which is absurd", self.len())));
        }
        let expected = self.len();
        let mut bytes = Vec::new();
        self.read_to_end(&mut bytes)?;
        if bytes.len() as u64 == expected { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

impl Read for Part {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let wanted = usize::try_from(self.len()).unwrap_or(usize::MAX).min(buffer.len());
        let n_read = loop {
            match self.file.read_at(&mut buffer[..wanted], self.at) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        self.at += n_read as u64;
        Ok(n_read)
    }
}

/// Something that is read and hashed on the way.
pub(super) struct Checked<R> {
    inner: R,
    hasher: Sha256,
}

impl<R: Read> Checked<R> {
    pub(super) fn new(inner: R) -> Self {
        Self { inner, hasher: Sha256::new() }
    }

    /// Compares the digest of all that was read, which has to be all that there is.
    pub(super) fn check(self, expected: &Digest) -> io::Result<()> {
        let found = Digest::from_bytes(self.hasher.finalize().into());
        // A fuzzer does not find digests, and what lies behind them is to be tried too.
        let is_right = found == *expected || cfg!(fuzzing);
        if is_right { Ok(()) } else { Err(invalid(format!("has the digest {found} in truth"))) }
    }
}

impl<R: Read> Read for Checked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n_read = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..n_read]);
        Ok(n_read)
    }
}

/// Something whose reading is progress.
pub(super) struct Watched<'a, R> {
    pub(super) inner: R,
    pub(super) progress: &'a dyn Progress,
}

impl<R: Read> Read for Watched<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n_read = self.inner.read(buffer)?;
        self.progress.advance(n_read as u64);
        Ok(n_read)
    }
}

/// Returns the digest of some bytes.
pub(super) fn digest_of(bytes: &[u8]) -> Digest {
    Digest::from_bytes(Sha256::digest(bytes).into())
}

/// How something is packed, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    Plain,
    Gzip,
    Zstd,
    /// Something that no image is packed by, with its name.
    Other(&'static str),
}

impl Packing {
    pub(super) fn of(start: &[u8]) -> Self {
        match start {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            // A frame to be skipped, which zstd:chunked may begin with.
            [first, 0x2a, 0x4d, 0x18, ..] if first >> 4 == 5 => Self::Zstd,
            [0xfd, b'7', b'z', b'X', b'Z', ..] => Self::Other("xz"),
            [b'B', b'Z', b'h', ..] => Self::Other("bzip2"),
            _ => Self::Plain,
        }
    }
}

/// Unpacks whatever it is packed by. The result may stop before the input's end, where something follows that is not packed.
pub(super) fn unpacked<'r>(input: impl Read + 'r) -> io::Result<Box<dyn Read + 'r>> {
    let mut input = BufReader::with_capacity(CHUNK, input);
    Ok(match Packing::of(input.fill_buf()?) {
        Packing::Plain => Box::new(input),
        Packing::Gzip => Box::new(BufReader::with_capacity(CHUNK, MultiGzDecoder::new(input))),
        Packing::Zstd => Box::new(BufReader::with_capacity(CHUNK, zstd::stream::read::Decoder::with_buffer(input)?)),
        Packing::Other(name) => {
            return Err(invalid(format!("is packed by {name}, and expected was gzip, zstd or no packing")));
        }
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn each_packing_is_undone() {
        let text = b"what was packed".repeat(1000);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&text).unwrap();
        let gzip = gzip.finish().unwrap();
        let zstd = zstd::encode_all(&text[..], 1).unwrap();
        let skipped = [&[0x50, 0x2a, 0x4d, 0x18, 1, 0, 0, 0, 9], &zstd[..]].concat();
        for packed in [text.clone(), gzip.clone(), zstd, skipped] {
            let mut back = Vec::new();
            unpacked(&packed[..]).unwrap().read_to_end(&mut back).unwrap();
            assert_eq!(back, text);
        }
        // As `pigz` and others write it: one after another.
        let mut back = Vec::new();
        unpacked(&[&gzip[..], &gzip[..]].concat()[..]).unwrap().read_to_end(&mut back).unwrap();
        assert_eq!(back.len(), 2 * text.len());
        let Err(error) = unpacked(&b"BZh91AY"[..]) else { panic!("bzip2 is not known") };
        assert!(error.to_string().contains("bzip2"));
    }

    #[test]
    fn a_part_ends_where_it_ends() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        let file = Arc::new(file);
        let mut part = Part::new(Arc::clone(&file), 2, 5);
        assert_eq!(part.clone().read_whole(5).unwrap(), b"23456");
        assert!(part.clone().read_whole(4).is_err());
        part.skip(3).unwrap();
        let mut start = [0; 9];
        assert_eq!(part.peek(&mut start).unwrap(), 2);
        assert!(part.skip(3).is_err());
        assert!(Part::new(file, 8, 5).read_whole(9).is_err());
    }
}
