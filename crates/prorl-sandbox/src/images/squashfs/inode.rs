//! Inodes: what a file is, apart from its names.

use super::{
    metadata::{Cursor, Metadata},
    packed::{Fault, Numbers, Superblock},
};

/// Stands for "none" where an index is expected.
const NONE: u32 = u32::MAX;
/// Longest target of a link that the system takes, in bytes.
const MAX_TARGET_LEN: u32 = 4095;

/// One file, of whatever kind.
pub(super) struct Inode {
    pub(super) mode: u16,
    /// Seconds since 1970.
    pub(super) mtime: u32,
    pub(super) n_links: u32,
    /// Index of its extended attributes.
    pub(super) attributes: Option<u32>,
    pub(super) kind: Kind,
}

pub(super) enum Kind {
    /// With where its list of names begins, as a reference, and the list's length in bytes.
    Folder {
        names: u64,
        len: u32,
    },
    File(Contents),
    Link(Vec<u8>),
    Fifo,
    Device,
    Socket,
}

/// Where the bytes of a file are.
pub(super) struct Contents {
    pub(super) len: u64,
    /// Position of the first block.
    pub(super) start: u64,
    pub(super) n_blocks: u64,
    /// What is in front of the blocks' packed sizes. They are read as they are needed: there may be any number of them.
    pub(super) sizes: Cursor,
    pub(super) tail: Option<Tail>,
}

/// The end of a file, which shares a block with others.
pub(super) struct Tail {
    /// Index of the fragment.
    pub(super) fragment: u32,
    /// First byte in it, unpacked.
    pub(super) offset: u32,
    /// How many.
    pub(super) len: usize,
}

impl Inode {
    pub(super) fn read(metadata: &mut Metadata<'_>, superblock: &Superblock, reference: u64) -> Result<Self, Fault> {
        let mut cursor = Cursor::new(superblock.inodes, reference);
        let header = cursor.array::<16>(metadata)?;
        let mut header = Numbers(&header);
        let (kind, mode, _owner, _group) = (header.u16(), header.u16(), header.u16(), header.u16());
        let mtime = header.u32();
        let mut inode = Self { mode, mtime, n_links: 1, attributes: None, kind: Kind::Socket };
        // Kinds from 8 on are those of 1 to 7 with more room.
        inode.kind = match kind {
            1 => {
                let fields = cursor.array::<16>(metadata)?;
                let mut fields = Numbers(&fields);
                let (block, _n_links, len, pos) = (fields.u32(), fields.u32(), fields.u16(), fields.u16());
                Kind::Folder { names: reference_of(block, pos), len: names_len(len.into()) }
            }
            8 => {
                let fields = cursor.array::<24>(metadata)?;
                let mut fields = Numbers(&fields);
                let (_n_links, len, block, _parent) = (fields.u32(), fields.u32(), fields.u32(), fields.u32());
                let (_index_len, pos, attributes) = (fields.u16(), fields.u16(), fields.u32());
                inode.attributes = some(attributes);
                Kind::Folder { names: reference_of(block, pos), len: names_len(len) }
            }
            2 => {
                let fields = cursor.array::<16>(metadata)?;
                let mut fields = Numbers(&fields);
                let (start, fragment, offset, len) = (fields.u32(), fields.u32(), fields.u32(), fields.u32());
                Kind::File(contents(superblock, start.into(), len.into(), (fragment, offset), cursor))
            }
            9 => {
                let fields = cursor.array::<40>(metadata)?;
                let mut fields = Numbers(&fields);
                let (start, len, _holes) = (fields.u64(), fields.u64(), fields.u64());
                inode.n_links = fields.u32();
                let tail = (fields.u32(), fields.u32());
                inode.attributes = some(fields.u32());
                Kind::File(contents(superblock, start, len, tail, cursor))
            }
            3 | 10 => {
                inode.n_links = cursor.u32(metadata)?;
                let len = cursor.u32(metadata)?;
                if len == 0 || len > MAX_TARGET_LEN {
                    return Err(format!("is a link to a name of {len} bytes").into());
                }
                let mut target = vec![0; len as usize];
                cursor.read(metadata, &mut target)?;
                if target.contains(&0) {
                    return Err("is a link to a name that no system takes".into());
                }
                Kind::Link(target)
            }
            4 | 5 | 11 | 12 => Kind::Device,
            6 | 13 => {
                inode.n_links = cursor.u32(metadata)?;
                Kind::Fifo
            }
            7 | 14 => Kind::Socket,
            other => return Err(format!("is of the unknown kind {other}").into()),
        };
        Ok(inode)
    }
}

fn some(index: u32) -> Option<u32> {
    (index != NONE).then_some(index)
}

fn reference_of(block: u32, pos: u16) -> u64 {
    u64::from(block) << 16 | u64::from(pos)
}

/// The length in an inode counts three bytes for `.` and `..`, which are in no list.
fn names_len(len: u32) -> u32 {
    len.saturating_sub(3)
}

fn contents(superblock: &Superblock, start: u64, len: u64, tail: (u32, u32), sizes: Cursor) -> Contents {
    let block_len = superblock.block_len as u64;
    let (n_whole, rest) = (len / block_len, len % block_len);
    let (fragment, offset) = tail;
    let tail_len = usize::try_from(rest).expect("less than a block");
    let tail = (fragment != NONE && rest > 0).then_some(Tail { fragment, offset, len: tail_len });
    let n_blocks = if rest > 0 && tail.is_none() { n_whole + 1 } else { n_whole };
    Contents { len, start, n_blocks, sizes, tail }
}
