//! The folders that sandboxes and temporary files need on disk.

use std::{
    fs,
    io::ErrorKind,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use nix::{
    sys::statvfs::{FsFlags, statvfs},
    unistd::{AccessFlags, access},
};

use super::{Config, Finding, advice::Trouble};
use crate::{SandboxUser, start};

const MIB: u64 = 1 << 20;

/// Free space below this is worth a word.
const LITTLE_SPACE: u64 = 1024 * MIB;

/// What a runtime writes for itself.
const NO_SPACE: u64 = 16 * MIB;

const NO_TEMP_DIR: &str =
    "temporary files have nowhere to go, nor what sandboxes need on disk unless --run-dir says where";

const NO_RUN_DIR: &str = "no sandbox can be started without it";

const SET_TEMP_DIR: &str = "set TMPDIR to a folder that this user may write to";

const SET_RUN_DIR: &str = "name a folder that this user may write to, or one in such a folder (--run-dir or TMPDIR)";

pub(super) fn temp_dir(config: &Config) -> Finding {
    match look(&config.temp_dir, SET_TEMP_DIR) {
        Ok(space) => space.judge(space.text(&config.temp_dir), "temporary files have room", NO_TEMP_DIR),
        Err(trouble) => trouble.bad(NO_TEMP_DIR),
    }
}

pub(super) fn run_dir(config: &Config) -> Finding {
    let dir = std::path::absolute(&config.run_dir).unwrap_or_else(|_| config.run_dir.clone());
    let is_missing = fs::symlink_metadata(&dir).is_err_and(|error| error.kind() == ErrorKind::NotFound);
    // A node makes its folder, but none of those above.
    let (place, prefix) = match dir.parent() {
        Some(parent) if is_missing => (parent, format!("{} will be made; ", dir.display())),
        _ => (dir.as_path(), String::new()),
    };
    let space = match look(place, SET_RUN_DIR) {
        Ok(space) => space,
        Err(Trouble { found, remedy }) => {
            let found = if is_missing { format!("{} cannot be made: {found}", dir.display()) } else { found };
            return Finding::bad(found, NO_RUN_DIR, remedy);
        }
    };
    let text = prefix + &space.text(place);
    if space.is_noexec {
        return Finding::warn(
            format!("{text}, noexec"),
            "Singularity's runtime keeps a program there that it must execute",
            "name a folder without noexec (--run-dir or TMPDIR)",
        );
    }
    // The trials say what is wrong with the user itself.
    if let Ok(Some(user)) = start::become_user(config.sandbox_user)
        && let Some(closed) = closed_to(place, user)
    {
        return Finding::warn(
            format!("{text}; {} is closed to user {}", closed.display(), user.uid),
            "Singularity's runtime runs as that user and has to get there",
            format!("let everybody pass through it (chmod o+x {}), or name another (--run-dir)", closed.display()),
        );
    }
    space.judge(text, "room for what runtimes write; sandboxes themselves write to memory", NO_RUN_DIR)
}

/// What is known of a folder that can be written.
struct Space {
    free: u64,
    size: u64,
    is_noexec: bool,
}

impl Space {
    fn text(&self, dir: &Path) -> String {
        format!("{}: {} of {} MiB free", dir.display(), self.free / MIB, self.size / MIB)
    }

    fn judge(&self, text: String, ok: &str, full: &str) -> Finding {
        let remedy = "free some space, or set TMPDIR to a folder with more";
        match self.free {
            ..NO_SPACE => Finding::bad(text, full, remedy),
            NO_SPACE..LITTLE_SPACE => Finding::warn(text, "unpacked images and results may not fit", remedy),
            _ => Finding::ok(text, ok),
        }
    }
}

fn look(dir: &Path, remedy: &str) -> Result<Space, Trouble> {
    let shown = dir.display();
    let meta = fs::metadata(dir).map_err(|error| match error.kind() {
        ErrorKind::NotFound => Trouble::new(format!("there is no folder {shown}"), format!("make it, or {remedy}")),
        _ => Trouble::new(format!("{shown}: {error}"), remedy),
    })?;
    if !meta.is_dir() {
        return Err(Trouble::new(format!("{shown} is no folder"), remedy));
    }
    access(dir, AccessFlags::W_OK | AccessFlags::X_OK)
        .map_err(|errno| Trouble::new(format!("{shown} is not writable: {}", errno.desc()), remedy))?;
    let stat = statvfs(dir).map_err(|errno| Trouble::new(format!("{shown}: {}", errno.desc()), remedy))?;
    let block = stat.fragment_size();
    Ok(Space {
        free: stat.blocks_available() * block,
        size: stat.blocks() * block,
        is_noexec: stat.flags().contains(FsFlags::ST_NOEXEC),
    })
}

/// Returns the topmost folder on the way to `dir`, itself included, that `user` may not pass through, by its mode.
fn closed_to(dir: &Path, user: SandboxUser) -> Option<PathBuf> {
    let dir = dir.canonicalize().ok()?;
    let is_closed = |path: &&Path| {
        fs::metadata(path).is_ok_and(|meta| {
            let bit = match (meta.uid() == user.uid, meta.gid() == user.gid) {
                (true, _) => 0o100,
                (false, true) => 0o010,
                (false, false) => 0o001,
            };
            meta.mode() & bit == 0
        })
    };
    dir.ancestors().filter(is_closed).last().map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::doctor::State;

    fn examined(temp_dir: &Path, run_dir: &Path) -> [Finding; 2] {
        let config = Config { temp_dir: temp_dir.into(), run_dir: run_dir.into(), ..Config::new("/guest") };
        [super::temp_dir(&config), super::run_dir(&config)]
    }

    #[test]
    fn the_folder_that_is_missing_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let (missing, file) = (dir.path().join("not"), dir.path().join("file"));
        fs::write(&file, "").unwrap();
        for (place, words) in [(&missing, "there is no folder"), (&file, "is no folder")] {
            for finding in examined(place, &place.join("prorl-7")) {
                assert_eq!(finding.state, State::Bad, "{}", finding.found);
                let is_named = finding.found.contains(place.to_str().unwrap());
                // Below a file there is no telling what is missing.
                assert!(is_named && (finding.found.contains(words) || place == &file), "{}", finding.found);
                assert!(finding.remedy.unwrap().contains("TMPDIR"));
            }
        }
        assert!(examined(&file, &file).iter().all(|finding| finding.found.ends_with("is no folder")));
    }

    #[test]
    fn a_run_dir_is_made_in_a_folder_that_is_there() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let [_, finding] = examined(dir.path(), &dir.path().join("prorl-7"));
        assert_ne!(finding.state, State::Bad, "{}", finding.found);
        assert!(finding.found.contains("prorl-7 will be made; "), "{}", finding.found);
        assert_eq!(examined(Path::new("/proc"), &dir.path().join("a/b")).map(|finding| finding.state), [State::Bad; 2]);
    }

    #[test]
    fn a_folder_that_the_sandbox_user_cannot_pass_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let (closed, inner) = (dir.path().join("closed"), dir.path().join("closed/inner"));
        fs::create_dir_all(&inner).unwrap();
        let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        set(dir.path(), 0o711);
        set(&closed, 0o700);
        set(&inner, 0o700);
        let meta = fs::metadata(&closed).unwrap();
        let stranger = SandboxUser { uid: meta.uid() + 1, gid: meta.gid() + 1 };
        assert_eq!(closed_to(&inner, stranger), Some(closed.canonicalize().unwrap()));
        assert_eq!(closed_to(&inner, SandboxUser { uid: meta.uid(), ..stranger }), None);
        set(&closed, 0o710);
        set(&inner, 0o710);
        assert_eq!(closed_to(&inner, SandboxUser { gid: meta.gid(), ..stranger }), None);
        if nix::unistd::geteuid().is_root() {
            let user = Some(SandboxUser { uid: 4_000_001, gid: 4_000_001 });
            let config = Config { run_dir: inner.join("prorl"), sandbox_user: user, ..Config::new("/guest") };
            let finding = run_dir(&config);
            assert_eq!(finding.state, State::Warn, "{}", finding.found);
            assert!(finding.found.contains("closed to user 4000001"), "{}", finding.found);
        }
    }
}
