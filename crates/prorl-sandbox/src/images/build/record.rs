//! What is remembered of a build, and what that says about the next one.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{CacheMode, inputs::Input};
use crate::{images::ImageError, store::Digest};

/// The form of records here. One of another form is not known, which means a rebuild.
const FORMAT: u32 = 1;

/// The folder, in a state, of records, and how their names end. One that is being written ends in the name of its build.
pub(super) const RECORDS: &str = "records";
pub(super) const ENDING: &str = "json";

/// Digits of a digest that are shown.
const SHOWN_DIGITS: usize = 12;

/// What is remembered of the last build of an output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    format: u32,
    /// Tells one build from another.
    pub(super) build: String,
    /// Of the image file.
    pub(super) output: Digest,
    pub(super) facts: Facts,
}

/// What a build was made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Facts {
    /// Of the rendered definition.
    pub(super) definition: Digest,
    pub(super) compression: String,
    /// Of prorl.
    pub(super) version: String,
    /// What the definition builds on; nothing as long as that was not looked at.
    pub(super) bases: Option<Vec<Input>>,
    /// Its lock files, where the mode asks for them.
    pub(super) locks: Option<Vec<Input>>,
}

/// What there is of the last build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Last {
    /// Nothing: it is the first.
    Nothing,
    /// Something that cannot be read, and why.
    Damaged(String),
    Known(Record),
}

impl Record {
    pub(super) fn new(build: String, output: Digest, facts: Facts) -> Self {
        Self { format: FORMAT, build, output, facts }
    }

    /// Writes it at once: who reads it sees the old one or this.
    pub(super) fn write(&self, path: &Path) -> Result<(), ImageError> {
        let at = |error| ImageError::at("write record", path, error);
        let text = serde_json::to_vec_pretty(self).map_err(|error| at(error.into()))?;
        let part = path.with_extension(&self.build);
        fs::write(&part, text).and_then(|()| fs::rename(&part, path)).map_err(|error| {
            let _ = fs::remove_file(&part);
            at(error)
        })
    }
}

impl Last {
    /// Reads what there is. Nothing that it may find stops a build.
    pub(super) fn read(path: &Path) -> Self {
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Self::Nothing,
            Err(error) => return Self::Damaged(error.to_string()),
        };
        match serde_json::from_slice::<Record>(&text) {
            Ok(record) if record.format == FORMAT => Self::Known(record),
            Ok(record) => Self::Damaged(format!("it has format {}", record.format)),
            Err(error) => Self::Damaged(error.to_string()),
        }
    }

    /// Returns which build it was.
    pub(super) fn build(&self) -> Option<&str> {
        match self {
            Self::Known(record) => Some(&record.build),
            Self::Nothing | Self::Damaged(_) => None,
        }
    }

    /// Returns why the image that is there will do, or why not. `is_fresh` says that it was built while this build waited.
    pub(super) fn judge(
        &self,
        mode: CacheMode,
        facts: &Facts,
        is_fresh: bool,
        found: Option<&Digest>,
    ) -> Result<String, String> {
        let record = match (self, found) {
            (Self::Nothing, None) => return Err("built: there was no image yet".to_owned()),
            (Self::Nothing, Some(_)) => {
                return Err("rebuilt: nothing is known of how the file that was there was made".to_owned());
            }
            (Self::Damaged(why), _) => return Err(format!("rebuilt: the record of the last build is damaged ({why})")),
            (Self::Known(record), _) => record,
        };
        let then = &record.facts;
        let changed = |what: &str, old: &str, new: &str| Err(format!("rebuilt: {what} changed ({old} is now {new})"));
        match found {
            None => return Err("rebuilt: the image was removed".to_owned()),
            Some(found) if *found != record.output => {
                let (built, found) = (short(&record.output), short(found));
                return Err(format!(
                    "rebuilt: the image was damaged or replaced ({built} was built, {found} is there)"
                ));
            }
            Some(_) => {}
        }
        if then.definition != facts.definition {
            return changed("the definition", &short(&then.definition), &short(&facts.definition));
        }
        if then.compression != facts.compression {
            return changed("the compression", &then.compression, &facts.compression);
        }
        // What another build of this moment did not ask about counts as unchanged.
        if is_fresh
            && (mode == CacheMode::Scratch
                || (agree(then.bases.as_ref(), facts.bases.as_ref())
                    && agree(then.locks.as_ref(), facts.locks.as_ref())))
        {
            return Ok("reused: another build of it ended while this one waited".to_owned());
        }
        match mode {
            CacheMode::Scratch => Err("rebuilt: that is what the mode scratch does".to_owned()),
            CacheMode::Versioned => {
                if then.version != facts.version {
                    return changed("prorl's version", &then.version, &facts.version);
                }
                let (then, now) = (then.bases.as_ref(), facts.bases.as_deref().unwrap_or_default());
                let then = match then {
                    Some(then) => then.as_slice(),
                    // The definition is the same.
                    None if now.is_empty() => &[],
                    None => return Err("rebuilt: the last build took no note of the base image".to_owned()),
                };
                match difference("the base image", then, now) {
                    Some(reason) => Err(reason),
                    None => Ok(unchanged_bases(now)),
                }
            }
            CacheMode::Lock => {
                let (then, now) = (then.locks.as_ref(), facts.locks.as_deref().unwrap_or_default());
                let Some(then) = then else {
                    return Err("rebuilt: the last build took no note of lock files".to_owned());
                };
                match difference("the lock file", then, now) {
                    Some(reason) => Err(reason),
                    None if now.len() == 1 => Ok("reused: the lock file is byte-identical".to_owned()),
                    None => Ok(format!("reused: {} lock files are byte-identical", now.len())),
                }
            }
        }
    }
}

fn agree(then: Option<&Vec<Input>>, now: Option<&Vec<Input>>) -> bool {
    then.zip(now).is_none_or(|(then, now)| then == now)
}

/// Says what is not as it was, if anything.
fn difference(what: &str, then: &[Input], now: &[Input]) -> Option<String> {
    for input in now {
        match then.iter().find(|old| old.name == input.name) {
            None => return Some(format!("rebuilt: {what} {} is new", input.name)),
            Some(old) if old.digest != input.digest => {
                let (old, new) = (short(&old.digest), short(&input.digest));
                return Some(format!("rebuilt: {what} {} changed ({old} is now {new})", input.name));
            }
            Some(_) => {}
        }
    }
    let gone = then.iter().find(|old| now.iter().all(|input| input.name != old.name))?;
    Some(format!("rebuilt: {what} {} is no longer one", gone.name))
}

fn unchanged_bases(bases: &[Input]) -> String {
    match bases {
        [] => "reused: nothing that it is made from changed".to_owned(),
        [base] if is_reference(&base.name) => {
            format!("reused: it still builds on {} (what that stands for now was not looked up)", base.name)
        }
        [base] => format!("reused: {} is unchanged ({})", base.name, short(&base.digest)),
        bases if bases.iter().any(|base| is_reference(&base.name)) => {
            format!(
                "reused: the {} things that it builds on are unchanged (what references stand for was not looked up)",
                bases.len()
            )
        }
        bases => format!("reused: the {} things that it builds on are unchanged", bases.len()),
    }
}

fn is_reference(name: &str) -> bool {
    name.contains("://")
}

/// Returns enough of a digest for people.
fn short(digest: &Digest) -> String {
    format!("sha256:{}..", &digest.hex()[..SHOWN_DIGITS])
}

/// Returns where the record of an output is.
pub(super) fn path(state: &Path, key: &str) -> PathBuf {
    state.join(RECORDS).join(format!("{key}.{ENDING}"))
}

#[cfg(test)]
mod tests {
    use super::{super::inputs::of_bytes, *};

    fn input(name: &str, content: &str) -> Input {
        Input { name: name.to_owned(), digest: of_bytes(content.as_bytes()) }
    }

    fn facts() -> Facts {
        Facts {
            definition: of_bytes(b"definition"),
            compression: "zstd-1".to_owned(),
            version: "1.0.0".to_owned(),
            bases: Some(vec![input("/base", "base")]),
            locks: Some(vec![input("/a.lock", "a"), input("/b.lock", "b")]),
        }
    }

    /// What is said when the last build was `then` and this one is `now`.
    fn judged(mode: CacheMode, then: &Facts, now: &Facts) -> Result<String, String> {
        let output = of_bytes(b"output");
        let last = Last::Known(Record::new("1".to_owned(), output.clone(), then.clone()));
        last.judge(mode, now, false, Some(&output))
    }

    #[test]
    fn each_mode_reuses_and_rebuilds_for_its_own_reasons() {
        let same = facts();
        let refused = |mode, change: fn(&mut Facts)| {
            let mut now = facts();
            change(&mut now);
            judged(mode, &facts(), &now).unwrap_err()
        };
        let base = of_bytes(b"base");
        assert_eq!(
            judged(CacheMode::Scratch, &same, &same).unwrap_err(),
            "rebuilt: that is what the mode scratch does"
        );
        let unchanged = format!("reused: /base is unchanged (sha256:{}..)", &base.hex()[..12]);
        assert_eq!(judged(CacheMode::Versioned, &same, &same).unwrap(), unchanged);
        assert_eq!(judged(CacheMode::Lock, &same, &same).unwrap(), "reused: 2 lock files are byte-identical");
        for mode in [CacheMode::Versioned, CacheMode::Lock] {
            let said = refused(mode, |facts| facts.definition = of_bytes(b"other"));
            assert!(said.starts_with("rebuilt: the definition changed (sha256:"), "{said}");
            let said = refused(mode, |facts| facts.compression = "gzip".to_owned());
            assert_eq!(said, "rebuilt: the compression changed (zstd-1 is now gzip)");
        }
        let said = refused(CacheMode::Versioned, |facts| facts.version = "2.0.0".to_owned());
        assert_eq!(said, "rebuilt: prorl's version changed (1.0.0 is now 2.0.0)");
        let said = refused(CacheMode::Versioned, |facts| facts.bases = Some(vec![input("/base", "new")]));
        assert!(said.starts_with("rebuilt: the base image /base changed (sha256:"), "{said}");
        let said = refused(CacheMode::Lock, |facts| facts.locks.as_mut().unwrap()[1] = input("/b.lock", "c"));
        assert!(said.starts_with("rebuilt: the lock file /b.lock changed (sha256:"), "{said}");
        let said = refused(CacheMode::Lock, |facts| facts.locks.as_mut().unwrap().push(input("/c.lock", "")));
        assert_eq!(said, "rebuilt: the lock file /c.lock is new");
        let said = refused(CacheMode::Lock, |facts| facts.locks = Some(vec![input("/a.lock", "a")]));
        assert_eq!(said, "rebuilt: the lock file /b.lock is no longer one");
        // What a mode does not ask about does not count.
        let other = Facts { version: "2.0.0".to_owned(), bases: Some(Vec::new()), ..facts() };
        judged(CacheMode::Lock, &same, &other).unwrap();
        judged(CacheMode::Versioned, &same, &Facts { locks: None, ..facts() }).unwrap();
    }

    #[test]
    fn what_the_last_build_did_not_note_is_asked_anew() {
        let unnoted = Facts { bases: None, locks: None, ..facts() };
        assert!(judged(CacheMode::Versioned, &unnoted, &facts()).unwrap_err().contains("no note of the base image"));
        assert!(judged(CacheMode::Lock, &unnoted, &facts()).unwrap_err().contains("no note of lock files"));
        let without = Facts { bases: Some(Vec::new()), ..facts() };
        let said = judged(CacheMode::Versioned, &unnoted, &without).unwrap();
        assert_eq!(said, "reused: nothing that it is made from changed");
    }

    #[test]
    fn references_are_said_not_to_be_looked_up() {
        let pulled = Facts { bases: Some(vec![input("docker://a", "docker://a")]), ..facts() };
        let said = judged(CacheMode::Versioned, &pulled, &pulled).unwrap();
        assert!(said.contains("docker://a") && said.contains("not looked up"), "{said}");
    }

    #[test]
    fn an_image_that_ended_while_one_waited_will_do_unless_it_is_known_to_differ() {
        let (output, then) = (of_bytes(b"output"), Facts { bases: None, ..facts() });
        let last = Last::Known(Record::new("1".to_owned(), output.clone(), then));
        for mode in [CacheMode::Scratch, CacheMode::Versioned, CacheMode::Lock] {
            let said = last.judge(mode, &facts(), true, Some(&output)).unwrap();
            assert_eq!(said, "reused: another build of it ended while this one waited");
        }
        let changed = Facts { locks: Some(vec![input("/a.lock", "new")]), ..facts() };
        last.judge(CacheMode::Lock, &changed, true, Some(&output)).unwrap_err();
        last.judge(CacheMode::Scratch, &facts(), true, None).unwrap_err();
    }

    #[test]
    fn an_output_that_is_not_the_one_that_was_built_is_rebuilt() {
        let last = Last::Known(Record::new("1".to_owned(), of_bytes(b"output"), facts()));
        let said = last.judge(CacheMode::Lock, &facts(), false, None).unwrap_err();
        assert_eq!(said, "rebuilt: the image was removed");
        let said = last.judge(CacheMode::Lock, &facts(), false, Some(&of_bytes(b"other"))).unwrap_err();
        assert!(said.starts_with("rebuilt: the image was damaged or replaced (sha256:"), "{said}");
        let said = Last::Nothing.judge(CacheMode::Lock, &facts(), false, Some(&of_bytes(b"other"))).unwrap_err();
        assert!(said.starts_with("rebuilt: nothing is known"), "{said}");
    }

    #[test]
    fn damaged_records_are_said_and_mean_a_rebuild() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("x.json");
        assert_eq!(Last::read(&file), Last::Nothing);
        let record = Record::new("1".to_owned(), of_bytes(b"output"), facts());
        record.write(&file).unwrap();
        assert_eq!(Last::read(&file), Last::Known(record.clone()));
        let text = fs::read_to_string(&file).unwrap();
        for damaged in [&text[..text.len() / 2], "", "[]", &text.replace("\"format\": 1", "\"format\": 2")] {
            fs::write(&file, damaged).unwrap();
            let last = Last::read(&file);
            assert!(matches!(last, Last::Damaged(_)), "{damaged}");
            let said = last.judge(CacheMode::Lock, &facts(), true, Some(&of_bytes(b"output"))).unwrap_err();
            assert!(said.starts_with("rebuilt: the record of the last build is damaged"), "{said}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
