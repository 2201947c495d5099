//! The bytes of a packed file system, and what its superblock says of them.

use std::{borrow::Cow, fs::File, io, os::unix::fs::FileExt as _};

use super::codec::Codec;

/// Why something of the image cannot be read.
#[derive(Debug)]
pub(super) enum Fault {
    /// It is not what it has to be. The text reads on after the thing's name.
    Wrong(Cow<'static, str>),
    /// The system refuses to read it.
    Unreadable(io::Error),
}

impl From<&'static str> for Fault {
    fn from(problem: &'static str) -> Self {
        Self::Wrong(Cow::Borrowed(problem))
    }
}

impl From<String> for Fault {
    fn from(problem: String) -> Self {
        Self::Wrong(Cow::Owned(problem))
    }
}

/// Where in a file the packed bytes are. Positions count from the first of them.
pub(super) struct Packed<'a> {
    file: &'a File,
    offset: u64,
    len: u64,
}

impl<'a> Packed<'a> {
    pub(super) fn new(file: &'a File, offset: u64, len: u64) -> Self {
        Self { file, offset, len }
    }

    /// Fills `buf` from position `at` on.
    pub(super) fn read(&self, at: u64, buf: &mut [u8]) -> Result<(), Fault> {
        if at.checked_add(buf.len() as u64).is_none_or(|end| end > self.len) {
            return Err(format!("lies at byte {at}, and the image has {}", self.len).into());
        }
        let at = self.offset.checked_add(at).ok_or("lies beyond the end of any file")?;
        self.file.read_exact_at(buf, at).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => "lies beyond the end of the file".into(),
            _ => Fault::Unreadable(error),
        })
    }
}

/// Little-endian numbers from the front of bytes.
pub(super) struct Numbers<'a>(pub(super) &'a [u8]);

impl Numbers<'_> {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let (bytes, rest) = self.0.split_first_chunk().expect("structures have a fixed length");
        self.0 = rest;
        *bytes
    }

    pub(super) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.bytes())
    }

    pub(super) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.bytes())
    }

    pub(super) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }
}

/// Marks a table that does not exist.
const ABSENT: u64 = u64::MAX;
const MAGIC: u32 = 0x7371_7368;
const SUPERBLOCK_LEN: usize = 96;
/// Smallest and largest size of blocks, in bytes.
const BLOCK_BYTES: std::ops::RangeInclusive<u32> = 4 << 10..=1 << 20;

/// What is needed of the superblock, checked.
#[derive(Debug)]
pub(super) struct Superblock {
    pub(super) codec: Codec,
    /// Size of a whole block of a file, and the largest of a fragment, in bytes: a power of two.
    pub(super) block_len: usize,
    /// Position of the first inode and of what comes after the last.
    pub(super) inodes: (u64, u64),
    /// The same of the lists of names.
    pub(super) names: (u64, u64),
    pub(super) n_fragments: u32,
    pub(super) fragments: u64,
    /// Position of the table of extended attributes.
    pub(super) attributes: Option<u64>,
    /// Reference of the root folder's inode.
    pub(super) root: u64,
}

impl Superblock {
    pub(super) fn read(packed: &Packed<'_>) -> Result<Self, Fault> {
        let mut bytes = [0; SUPERBLOCK_LEN];
        packed.read(0, &mut bytes)?;
        let mut fields = Numbers(&bytes);
        if fields.u32() != MAGIC {
            return Err("is not that of a squashfs".into());
        }
        let (_n_inodes, _made_at) = (fields.u32(), fields.u32());
        let block_len = fields.u32();
        let n_fragments = fields.u32();
        let codec = fields.u16();
        let (block_log, _flags, _n_owners) = (fields.u16(), fields.u16(), fields.u16());
        let version = (fields.u16(), fields.u16());
        let (root, len) = (fields.u64(), fields.u64());
        let (owners, attributes, inodes, names) = (fields.u64(), fields.u64(), fields.u64(), fields.u64());
        let (fragments, exports) = (fields.u64(), fields.u64());

        if version != (4, 0) {
            return Err(format!("is of version {}.{}, and only 4.0 is known", version.0, version.1).into());
        }
        if !BLOCK_BYTES.contains(&block_len) || 1u32.checked_shl(block_log.into()) != Some(block_len) {
            return Err(format!("claims blocks of {block_len} bytes").into());
        }
        if len > packed.len {
            return Err(format!("claims {len} bytes, and there are {}; was it copied whole?", packed.len).into());
        }
        // Tables follow each other in this order, the optional ones last; each ends at the latest where the next one starts.
        let rest = [fragments, exports, owners, attributes];
        let names_end = rest.into_iter().filter(|at| *at != ABSENT).fold(len, u64::min);
        if !(SUPERBLOCK_LEN as u64 <= inodes && inodes < names && names <= names_end) {
            return Err("has its tables in an impossible order".into());
        }
        if rest.into_iter().any(|at| at != ABSENT && at > len) {
            return Err("names a table beyond its end".into());
        }
        Ok(Self {
            codec: Codec::of(codec)?,
            block_len: block_len as usize,
            inodes: (inodes, names),
            names: (names, names_end),
            n_fragments,
            fragments,
            attributes: (attributes != ABSENT).then_some(attributes),
            root,
        })
    }
}
