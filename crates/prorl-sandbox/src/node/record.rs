//! What is written down of a sandbox while it exists, so that somebody else can end it.
//!
//! A record is a file of frames, each appended in one write as the sandbox comes to be. A reader takes the whole frames and
//! ignores what follows them, so that a writer killed at any moment has either said a thing or not.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

use prorl_core::frame;
use serde::{Deserialize, Serialize};

#[cfg(feature = "host")]
pub(crate) use self::write::{create, extend};
use super::process::Process;

/// How far a sandbox's processes reach beyond its outer one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reach {
    /// All others are in the pid namespace of process 1, and die with it.
    PidNamespace,
    /// Helpers run beside that namespace, in the session that the outer process leads.
    Session,
}

/// A sandbox that has said hello.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Standing {
    /// Process 1 of its pid namespace.
    pub(crate) inner: Process,
    /// Clock ticks from boot to the hello.
    pub(crate) at: u64,
    /// Inode numbers of its user namespaces: that of process 1 and those between it and the host's.
    pub(crate) user_namespaces: Vec<u64>,
}

/// One frame of a record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Event {
    /// It is going to be started.
    Claimed {
        /// Name of the runtime.
        runtime: String,
    },
    /// It has an outer process, which has not been told yet what to do.
    Spawned {
        /// The outer process.
        outer: Process,
        /// Where the others are.
        reach: Reach,
    },
    /// It has said hello.
    Stands(Standing),
    /// It is going to have a control group, which is the sandbox's alone.
    Grouped {
        /// Its folder.
        path: OsString,
    },
}

/// What is known of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    /// The outer process and the reach of the others, once it exists.
    pub(crate) spawned: Option<(Process, Reach)>,
    /// What came with the hello.
    pub(crate) standing: Option<Standing>,
    /// The folder of its control group, if there is to be one.
    pub(crate) group: Option<PathBuf>,
}

impl Record {
    /// Takes in what happened next.
    pub(crate) fn apply(&mut self, event: Event) {
        match event {
            Event::Claimed { .. } => {}
            Event::Spawned { outer, reach } => self.spawned = Some((outer, reach)),
            Event::Stands(standing) => self.standing = Some(standing),
            Event::Grouped { path } => self.group = Some(path.into()),
        }
    }

    /// Reads a record as far as it makes sense; of garbage that is nothing.
    pub(crate) fn read(path: &Path) -> io::Result<Self> {
        let mut decoder = frame::Decoder::default();
        decoder.push(&fs::read(path)?);
        let mut record = Self::default();
        while let Ok(Some(event)) = decoder.pop() {
            record.apply(event);
        }
        Ok(record)
    }
}

#[cfg(feature = "host")]
mod write {
    use std::{
        fs::{File, OpenOptions},
        io::{self, Write as _},
        path::Path,
    };

    use prorl_core::frame;

    use super::Event;

    /// Creates a record that begins with `event`.
    pub(crate) fn create(path: &Path, event: &Event) -> io::Result<()> {
        append(File::options().append(true).create_new(true), path, event)
    }

    /// Appends to a record that exists.
    pub(crate) fn extend(path: &Path, event: &Event) -> io::Result<()> {
        append(File::options().append(true), path, event)
    }

    fn append(options: &OpenOptions, path: &Path, event: &Event) -> io::Result<()> {
        let bytes = frame::encode(event).map_err(io::Error::other)?;
        options.open(path)?.write_all(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(events: &[Event]) -> Vec<u8> {
        events.iter().flat_map(|event| frame::encode(event).unwrap()).collect()
    }

    fn read(bytes: &[u8]) -> Record {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), bytes).unwrap();
        Record::read(file.path()).unwrap()
    }

    fn events() -> [Event; 4] {
        let outer = Process { pid: 7, started: Some(70), inode: None };
        let inner = Process { pid: 8, started: Some(71), inode: None };
        [
            Event::Claimed { runtime: "namespace".to_owned() },
            Event::Grouped { path: "/sys/fs/cgroup/prorl-1-2/namespace-1-0".into() },
            Event::Spawned { outer, reach: Reach::Session },
            Event::Stands(Standing { inner, at: 72, user_namespaces: vec![4_026_531_837] }),
        ]
    }

    #[test]
    fn a_record_cut_anywhere_is_what_was_said_before() {
        let mut ends = vec![0];
        ends.extend((1..=4).map(|n_events| written(&events()[..n_events]).len()));
        let all = written(&events());
        for len in 0..=all.len() {
            let n_whole = ends.iter().rposition(|end| *end <= len).unwrap();
            let mut expected = Record::default();
            events()[..n_whole].iter().for_each(|event| expected.apply(event.clone()));
            assert_eq!(read(&all[..len]), expected, "{len}");
        }
    }

    #[test]
    fn garbage_says_nothing() {
        for garbage in [&b""[..], b"\0", b"\xff\xff\xff\xff", b"\x01\0\0\0\x09", &[0; 300], &[b'x'; 5000]] {
            assert_eq!(read(garbage), Record::default());
        }
        // What stood before it still holds.
        let mut bytes = written(&events()[..3]);
        bytes.extend([7; 40]);
        assert!(read(&bytes).spawned.is_some());
    }

    #[test]
    fn a_record_is_created_once_and_extended_only_where_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one");
        assert_eq!(extend(&path, &events()[0]).unwrap_err().kind(), io::ErrorKind::NotFound);
        create(&path, &events()[0]).unwrap();
        assert_eq!(create(&path, &events()[0]).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        extend(&path, &events()[2]).unwrap();
        assert_eq!(
            Record::read(&path).unwrap().spawned,
            Some((Process { pid: 7, started: Some(70), inode: None }, Reach::Session))
        );
    }
}
