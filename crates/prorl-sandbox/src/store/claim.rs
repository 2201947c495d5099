//! Who makes something: one process at a time, whichever machine it is on.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::pulse::{Fate, Pulse, fate};

/// How often a turn is tried for that others are trying for too, before it is left to them.
const MAX_TRIES: u32 = 100;

/// Whose turn it is.
#[derive(Debug)]
pub(crate) enum Turn {
    /// This call's, until the claim is dropped.
    Mine(Claim),
    /// Another one's, named for people.
    Of(String),
}

/// The right to make something. Given back when dropped, or when this process dies.
#[derive(Debug)]
pub(crate) struct Claim {
    what: PathBuf,
    mark: Option<PathBuf>,
    pulse: Arc<Pulse>,
}

/// Asks whose turn it is to make what is called `stem`: a plain file name without a dot. Does not wait.
///
/// Claims are marks `stem.1`, `stem.2`, .. in `folder`. Making a mark is exclusive, but removing that of a dead process is not:
/// between looking at it and removing it somebody else may have removed it and made a mark of the same name. So it is not
/// removed at first; the next number is made instead, by one of those who try. Who has made a mark looks again, and takes it
/// back if there is any other mark of a living process: of two who make different numbers at least the later one sees the
/// other's. Who is left alone with dead ones has the turn, and removes them: nobody else will, and no new mark of such a
/// name lasts, because whoever makes it sees that of the one whose turn it is.
///
/// A process of another machine that was taken for dead and is not may still be at work. So what is made must be put in its
/// place by one rename, whoever makes it: a claim saves work, and does not make it right.
pub(crate) fn take(pulse: &Arc<Pulse>, folder: &Path, stem: &str) -> io::Result<Turn> {
    let Some(mut claim) = Claim::among_threads(pulse, folder.join(stem)) else {
        return Ok(Turn::Of(pulse.owner().to_string()));
    };
    for _ in 0..MAX_TRIES {
        let (numbers, living) = look(pulse, folder, stem, None)?;
        if let Some(who) = living {
            return Ok(Turn::Of(who));
        }
        let number = numbers.last().map_or(1, |last| last + 1);
        let path = folder.join(format!("{stem}.{number}"));
        match pulse.mark(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            made => made?,
        }
        claim.mark = Some(path);
        let (numbers, living) = look(pulse, folder, stem, Some(number))?;
        if let Some(who) = living {
            return Ok(Turn::Of(who));
        }
        for dead in numbers {
            let _ = fs::remove_file(folder.join(format!("{stem}.{dead}")));
        }
        return Ok(Turn::Mine(claim));
    }
    Ok(Turn::Of("others".to_owned()))
}

/// Removes the claims of dead processes, and returns of how many things they were.
#[cfg(feature = "images")]
pub(crate) fn remove_dead(pulse: &Arc<Pulse>, folder: &Path) -> io::Result<usize> {
    let mut stems = std::collections::HashSet::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some((stem, _)) = name.to_str().and_then(parse) else { continue };
        if fate(&entry.path(), pulse.owner(), || pulse.now())? == Fate::Dead && stems.insert(stem.to_owned()) {
            // Whoever has the turn removes the marks of the dead, and nobody else may.
            drop(take(pulse, folder, stem)?);
        }
    }
    Ok(stems.len())
}

/// Returns the numbers of all claims but one, in order, and a living process that has one.
fn look(pulse: &Pulse, folder: &Path, stem: &str, mine: Option<u64>) -> io::Result<(Vec<u64>, Option<String>)> {
    let mut numbers: Vec<u64> = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(parse).filter(|(of, _)| *of == stem).map(|(_, number)| number);
        numbers.extend(number.filter(|number| Some(*number) != mine));
    }
    numbers.sort_unstable();
    // The highest first: it is the one that lives, if one does.
    for number in numbers.iter().rev() {
        let path = folder.join(format!("{stem}.{number}"));
        if let Fate::Lives(who) = fate(&path, pulse.owner(), || pulse.now())? {
            return Ok((numbers, Some(who)));
        }
    }
    Ok((numbers, None))
}

/// Takes a claim's name apart into what is claimed and a number.
pub(super) fn parse(name: &str) -> Option<(&str, u64)> {
    let (stem, number) = name.split_once('.')?;
    Some((stem, number.parse().ok()?))
}

impl Claim {
    /// Claims it among the threads of this process, whose marks are the same.
    fn among_threads(pulse: &Arc<Pulse>, what: PathBuf) -> Option<Self> {
        let is_free = pulse.claimed.lock().insert(what.clone());
        is_free.then(|| Self { what, mark: None, pulse: Arc::clone(pulse) })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.pulse.is_mine() {
            return;
        }
        // One that was taken away may be somebody else's by now.
        if let Some(mark) = self.mark.take().filter(|mark| self.pulse.has_marked(mark)) {
            let _ = fs::remove_file(mark);
        }
        self.pulse.claimed.lock().remove(&self.what);
    }
}
