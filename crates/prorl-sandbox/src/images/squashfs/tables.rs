//! Tables that are looked up by index: fragments and extended attributes. Nothing of them is read before it is needed.

use std::ffi::CString;

use super::{
    metadata::{Cursor, Metadata},
    packed::{Fault, Numbers, Superblock},
};
use crate::images::rules;

/// How many bytes of a table are in one block of metadata.
const BLOCK_LEN: u64 = 8192;

/// Goes to entry `idx`, of `entry_len` bytes, of a table in blocks whose positions are listed from `list` on. The blocks are in
/// front of `end`.
fn seek(metadata: &Metadata<'_>, list: u64, end: u64, idx: u32, entry_len: u64) -> Result<Cursor, Fault> {
    let at = u64::from(idx) * entry_len;
    let place = list.checked_add(at / BLOCK_LEN * 8).ok_or("is beyond the end of any table")?;
    let mut block = [0; 8];
    metadata.read_plain(place, &mut block)?;
    Ok(Cursor::new((u64::from_le_bytes(block), end), at % BLOCK_LEN))
}

/// Packed bytes that are unpacked as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DataBlock {
    /// Position of the first.
    pub(super) at: u64,
    pub(super) size: PackedSize,
}

/// How a block of data is packed, as the image writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PackedSize(u32);

impl PackedSize {
    const RAW: u32 = 1 << 24;

    pub(super) fn new(bits: u32) -> Self {
        Self(bits)
    }

    /// Whether it stands for zeroes only and takes no room.
    pub(super) fn is_hole(self) -> bool {
        self.len() == 0
    }

    pub(super) fn is_raw(self) -> bool {
        self.0 & Self::RAW != 0
    }

    /// Its length in the image, in bytes.
    pub(super) fn len(self) -> u32 {
        self.0 & !Self::RAW
    }
}

/// Returns where a fragment is.
pub(super) fn fragment(metadata: &mut Metadata<'_>, superblock: &Superblock, idx: u32) -> Result<DataBlock, Fault> {
    if idx >= superblock.n_fragments {
        return Err(format!("is in fragment {idx}, and there are {}", superblock.n_fragments).into());
    }
    let end = superblock.fragments;
    let entry = seek(metadata, superblock.fragments, end, idx, 16)?.array::<16>(metadata)?;
    let mut entry = Numbers(&entry);
    Ok(DataBlock { at: entry.u64(), size: PackedSize(entry.u32()) })
}

/// Extended attributes of a file.
#[derive(Default)]
pub(super) struct Attributes {
    /// The ones that are kept, with their values.
    pub(super) kept: Vec<(CString, Vec<u8>)>,
    /// Whether it had capabilities, which are not.
    pub(super) has_capabilities: bool,
}

/// Bytes of names and values that one file may have. No usual file system keeps nearly as many.
const MAX_ATTRIBUTES_LEN: usize = 1 << 20;
/// Longest name and value that the system takes, in bytes.
const MAX_NAME_LEN: usize = 255;
const MAX_VALUE_LEN: usize = 1 << 16;
/// Set in an attribute's kind where its value is elsewhere, because others have the same.
const ELSEWHERE: u16 = 0x100;

/// Returns the extended attributes of index `idx`.
pub(super) fn attributes(metadata: &mut Metadata<'_>, superblock: &Superblock, idx: u32) -> Result<Attributes, Fault> {
    let header_at = superblock.attributes.ok_or("has extended attributes, and the image has none")?;
    let mut header = [0; 16];
    metadata.read_plain(header_at, &mut header)?;
    let mut header = Numbers(&header);
    let (pairs, n_indexes) = (header.u64(), header.u32());
    if idx >= n_indexes {
        return Err(format!("has extended attributes {idx}, and there are {n_indexes}").into());
    }
    let entry = seek(metadata, header_at + 16, header_at, idx, 16)?.array::<16>(metadata)?;
    let mut entry = Numbers(&entry);
    let (reference, n_pairs) = (entry.u64(), entry.u32());
    let table = (pairs, header_at);
    let mut cursor = Cursor::new(table, reference);
    let mut left_bytes = MAX_ATTRIBUTES_LEN;
    let mut found = Attributes::default();
    for _ in 0..n_pairs {
        let key = cursor.array::<4>(metadata)?;
        let mut key = Numbers(&key);
        let (kind, name_len) = (key.u16(), usize::from(key.u16()));
        let prefix = match kind & 0xff {
            0 => "user.",
            1 => "trusted.",
            2 => "security.",
            other => return Err(format!("has an extended attribute of the unknown kind {other}").into()),
        };
        let mut name = prefix.as_bytes().to_vec();
        if prefix.len() + name_len > MAX_NAME_LEN {
            return Err("has an extended attribute with an impossible name".into());
        }
        name.resize(prefix.len() + name_len, 0);
        cursor.read(metadata, &mut name[prefix.len()..])?;
        let len = cursor.u32(metadata)? as usize;
        left_bytes = left_bytes
            .checked_sub(8 + name.len() + len)
            .ok_or("has more extended attributes than any file system keeps")?;
        if !rules::keeps_attribute(&name) {
            found.has_capabilities |= name == rules::CAPABILITY;
            cursor.skip(metadata, len)?;
            continue;
        }
        let value = if kind & ELSEWHERE == 0 {
            value(&mut cursor, metadata, len)?
        } else {
            let mut elsewhere = Cursor::new(table, Numbers(&cursor.array::<8>(metadata)?).u64());
            let len = elsewhere.u32(metadata)? as usize;
            left_bytes =
                left_bytes.checked_sub(len).ok_or("has more extended attributes than any file system keeps")?;
            value(&mut elsewhere, metadata, len)?
        };
        let name = CString::new(name).map_err(|_nul| "has an extended attribute with an impossible name")?;
        found.kept.push((name, value));
    }
    Ok(found)
}

fn value(cursor: &mut Cursor, metadata: &mut Metadata<'_>, len: usize) -> Result<Vec<u8>, Fault> {
    if len > MAX_VALUE_LEN {
        return Err(format!("has an extended attribute of {len} bytes").into());
    }
    let mut value = vec![0; len];
    cursor.read(metadata, &mut value)?;
    Ok(value)
}
