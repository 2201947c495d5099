//! Tars that hold an image: where their members are, so that each can be read alone.

use std::{collections::HashMap, fs::File, io, sync::Arc};

use super::{
    part::Part,
    tar_stream::{EntryKind, TarStream, invalid},
};

/// Most members of one. An image has a few for each of its layers.
const MAX_MEMBERS: usize = 100_000;

/// Most links from one member to another that are followed.
const MAX_LINKS: usize = 8;

/// A tar on disk.
pub(super) struct Archive {
    file: Arc<File>,
    members: HashMap<String, Member>,
}

enum Member {
    Data {
        at: u64,
        len: u64,
    },
    /// Another member, by its whole name.
    Link(String),
}

impl Archive {
    /// Reads all headers.
    pub(super) fn open(file: Arc<File>) -> io::Result<Self> {
        let len = file.metadata()?.len();
        let mut tar = TarStream::new(Part::new(Arc::clone(&file), 0, len));
        let mut members = HashMap::new();
        while let Some(entry) = tar.next_entry()? {
            let name = String::from_utf8_lossy(&entry.path).into_owned();
            let target = String::from_utf8_lossy(&entry.target).into_owned();
            let member = match entry.kind {
                EntryKind::File if entry.pieces.is_none() => Some(Member::Data { at: entry.data_pos, len: entry.size }),
                EntryKind::HardLink => Some(Member::Link(plain(&target))),
                EntryKind::SymbolicLink => {
                    let folder = name.rsplit_once('/').map_or("", |(folder, _name)| folder);
                    Some(Member::Link(plain(&format!("{folder}/{target}"))))
                }
                _ => None,
            };
            members.extend(member.map(|member| (plain(&name), member)));
            if members.len() > MAX_MEMBERS {
                return Err(invalid("has too many members for an image"));
            }
            tar.skip_data()?;
        }
        Ok(Self { file, members })
    }

    /// Tells whether it has such a member.
    pub(super) fn has(&self, name: &str) -> bool {
        self.members.contains_key(name)
    }

    /// Returns a member's data, or nothing where there is none.
    pub(super) fn member(&self, name: &str) -> Option<Part> {
        let mut name = plain(name);
        for _ in 0..=MAX_LINKS {
            match self.members.get(&name)? {
                Member::Data { at, len } => return Some(Part::new(Arc::clone(&self.file), *at, *len)),
                Member::Link(target) => name.clone_from(target),
            }
        }
        None
    }
}

/// A member's name without what does not matter. What climbs out is the name of none.
fn plain(name: &str) -> String {
    let mut parts = Vec::new();
    for part in name.split('/') {
        match part {
            "" | "." => {}
            ".." if parts.last().is_some_and(|last| *last != "..") => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_compared_without_detours() {
        assert_eq!(plain("./a//b/../c"), "a/c");
        assert_eq!(plain("a/../../b"), "../b");
        assert_eq!(plain("/a"), "a");
    }
}
