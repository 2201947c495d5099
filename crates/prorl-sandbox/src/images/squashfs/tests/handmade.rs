//! Images written byte by byte, to say what no packer would.

/// Bytes of metadata in a block.
const BLOCK_LEN: usize = 8192;
const SUPERBLOCK_LEN: u64 = 96;
/// Stands for "none".
pub(super) const NONE: u32 = u32::MAX;

/// An image in the making. Its metadata is not compressed; blocks are of 4 KiB, and those that claim so are of lz4.
pub(super) struct Handmade {
    /// What comes behind the superblock.
    pub(super) data: Vec<u8>,
    pub(super) inodes: Vec<u8>,
    pub(super) names: Vec<u8>,
    /// Position, packed size.
    pub(super) fragments: Vec<(u64, u32)>,
    /// Reference of the root folder.
    pub(super) root: u64,
    /// Number of fragments that is claimed, where that is another.
    pub(super) claimed_fragments: Option<u32>,
}

impl Handmade {
    pub(super) fn new() -> Self {
        Self {
            data: Vec::new(),
            inodes: Vec::new(),
            names: Vec::new(),
            fragments: Vec::new(),
            root: 0,
            claimed_fragments: None,
        }
    }

    /// Adds bytes of files and returns their position.
    pub(super) fn data(&mut self, bytes: &[u8]) -> u64 {
        let at = SUPERBLOCK_LEN + self.data.len() as u64;
        self.data.extend(bytes);
        at
    }

    /// Adds an inode of numbers behind the common ones and returns its reference.
    pub(super) fn inode(&mut self, kind: u16, mode: u16, rest: &[u8]) -> u64 {
        let reference = reference(self.inodes.len());
        for number in [kind, mode, 0, 0] {
            self.inodes.extend(number.to_le_bytes());
        }
        self.inodes.extend([0; 8]);
        self.inodes.extend(rest);
        reference
    }

    /// Adds a file of whole blocks, with the sizes that are claimed for them, and an end in a fragment.
    pub(super) fn file(&mut self, start: u64, len: u64, sizes: &[u32], (fragment, offset): (u32, u32)) -> u64 {
        let mut rest = Vec::new();
        for number in [start, len, 0] {
            rest.extend(number.to_le_bytes());
        }
        for number in [1, fragment, offset, NONE].iter().chain(sizes) {
            rest.extend(number.to_le_bytes());
        }
        self.inode(9, 0o644, &rest)
    }

    pub(super) fn empty_file(&mut self) -> u64 {
        self.file(0, 0, &[], (NONE, 0))
    }

    /// Adds a link that has two names.
    pub(super) fn link(&mut self, target: &[u8]) -> u64 {
        let len = u32::try_from(target.len()).unwrap();
        self.inode(3, 0o777, &[&2u32.to_le_bytes(), &len.to_le_bytes(), target].concat())
    }

    /// Adds a folder with these names.
    pub(super) fn folder(&mut self, entries: &[(&[u8], u64)]) -> u64 {
        let start = self.names.len();
        for (name, inode) in entries {
            self.name(1, *inode, name);
        }
        let len = self.names.len() - start;
        self.folder_at(start, len)
    }

    /// Adds a run of names that claims to be `n_names` long, with one name.
    pub(super) fn name(&mut self, n_names: u32, inode: u64, name: &[u8]) {
        for number in [n_names - 1, u32::try_from(inode >> 16).unwrap(), 0] {
            self.names.extend(number.to_le_bytes());
        }
        let pos = u16::try_from(inode & 0xffff).unwrap();
        for number in [pos, 0, 1, u16::try_from(name.len()).unwrap().wrapping_sub(1)] {
            self.names.extend(number.to_le_bytes());
        }
        self.names.extend(name);
    }

    /// Adds a folder whose names are at some place of the list.
    pub(super) fn folder_at(&mut self, start: usize, len: usize) -> u64 {
        let reference = reference(start);
        let (block, pos) = (u32::try_from(reference >> 16).unwrap(), u16::try_from(reference & 0xffff).unwrap());
        let mut rest = Vec::new();
        for number in [2, u32::try_from(len).unwrap() + 3, block, 1] {
            rest.extend(number.to_le_bytes());
        }
        for number in [0, pos] {
            rest.extend(number.to_le_bytes());
        }
        rest.extend(NONE.to_le_bytes());
        self.inode(8, 0o755, &rest)
    }

    /// Puts it together.
    pub(super) fn image(&self) -> Vec<u8> {
        let mut image = vec![0; usize::try_from(SUPERBLOCK_LEN).unwrap()];
        image.extend(&self.data);
        let inodes = image.len() as u64;
        metadata(&self.inodes, &mut image);
        let names = image.len() as u64;
        metadata(&self.names, &mut image);
        let fragments: Vec<_> = self
            .fragments
            .iter()
            .flat_map(|(at, size)| [&at.to_le_bytes()[..], &size.to_le_bytes(), &[0; 4]].concat())
            .collect();
        let first = image.len() as u64;
        let blocks = metadata(&fragments, &mut image);
        let list = image.len() as u64;
        for block in blocks {
            image.extend((first + block).to_le_bytes());
        }
        let len = image.len() as u64;
        let n_fragments = self.claimed_fragments.unwrap_or(u32::try_from(self.fragments.len()).unwrap());

        let mut superblock = Vec::new();
        for number in [0x7371_7368, 1, 0, 4096, n_fragments] {
            superblock.extend(u32::to_le_bytes(number));
        }
        for number in [5, 12, 0, 1, 4, 0] {
            superblock.extend(u16::to_le_bytes(number));
        }
        for number in [self.root, len, u64::MAX, u64::MAX, inodes, names, list, u64::MAX] {
            superblock.extend(number.to_le_bytes());
        }
        image[..superblock.len()].copy_from_slice(&superblock);
        image
    }
}

/// The reference of a byte of metadata, which is cut into blocks that are not compressed.
pub(super) fn reference(at: usize) -> u64 {
    let block = (at / BLOCK_LEN * (BLOCK_LEN + 2)) as u64;
    block << 16 | (at % BLOCK_LEN) as u64
}

/// Writes metadata and returns where each block is, from the first on.
fn metadata(bytes: &[u8], image: &mut Vec<u8>) -> Vec<u64> {
    let start = image.len();
    let write = |block: &[u8]| {
        let at = image.len() - start;
        image.extend((0x8000 | u16::try_from(block.len()).unwrap()).to_le_bytes());
        image.extend(block);
        at as u64
    };
    bytes.chunks(BLOCK_LEN).map(write).collect()
}
