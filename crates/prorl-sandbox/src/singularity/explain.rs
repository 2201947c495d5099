//! From a launcher's last words to an error that says what is in the way and who can remove it.

use std::{
    io,
    path::{Path, PathBuf},
};

use prorl_core::hello::StartFailure;

use crate::{
    Bind, LauncherFault, SandboxError, SandboxSpec, diagnosis,
    setup::{self, OWN_FOLDER, Setup, step},
};

/// What is needed to tell a failure in the words of the spec.
pub(super) struct Explain {
    program: PathBuf,
    image: PathBuf,
    binds: Vec<Bind>,
    /// Folders of the layers.
    layers: Vec<PathBuf>,
    user: String,
    /// Names that may be spoken of and that may hold any words themselves, in lower-case letters, the longest first.
    names: Vec<String>,
}

impl Explain {
    /// `setup` was made from `spec`, and `folder` is the sandbox's own.
    pub(super) fn new(program: PathBuf, spec: &SandboxSpec, setup: &Setup, folder: &Path) -> Self {
        let image = spec.image.path().unwrap_or(Path::new("")).to_owned();
        let uid = setup.become_user.map_or_else(|| nix::unistd::geteuid().as_raw(), |user| user.uid);
        let found = match &setup.image {
            setup::Image::Directory(path) | setup::Image::File(path) => path.as_path(),
            setup::Image::Host | setup::Image::Root => Path::new(""),
        };
        let binds = spec.binds.iter().chain(&setup.binds).map(|bind| bind.source.as_path());
        let layers: Vec<PathBuf> = setup.layers.iter().map(PathBuf::from).collect();
        let mut names: Vec<String> = [program.as_path(), &image, found, folder]
            .into_iter()
            .chain(binds)
            .chain(layers.iter().map(PathBuf::as_path))
            .map(|path| path.to_string_lossy().to_lowercase())
            .filter(|name| name.trim_matches('/').len() > 1)
            .collect();
        names.sort_unstable_by_key(|name| std::cmp::Reverse(name.len()));
        Self { program, image, binds: spec.binds.clone(), layers, user: format!("user {uid}"), names }
    }

    /// Makes an error of a failure of the owner's or the guest's. `proc` is `/proc`, or a tree like it in tests.
    pub(super) fn explain(self, proc: &Path, failure: StartFailure) -> SandboxError {
        match failure.step.as_str() {
            step::LAUNCH => self.of_words(proc, failure.target),
            step::LAUNCHED => SandboxError::Launcher {
                program: self.program,
                fault: LauncherFault::Other,
                cause: "it started the guest without a user namespace around it".to_owned(),
                advice: "name Apptainer's or Singularity's own program, or have what wraps it pass its arguments on"
                    .to_owned(),
                output: String::new(),
            },
            step::PASS_FOLDER => SandboxError::Folder {
                path: failure.target.into(),
                problem: format!("is closed to {}, who sandboxes run as", self.user),
                advice: "let everybody pass through it (chmod o+x), or name another folder for the node (--run-dir or TMPDIR)"
                    .to_owned(),
                source: io::Error::from_raw_os_error(failure.errno),
            },
            step::EXECUTE_LAUNCHER => {
                SandboxError::Program { path: self.program, source: io::Error::from_raw_os_error(failure.errno) }
            }
            step::OPEN_BIND => {
                let target =
                    self.bind_in(&failure.target).map_or(failure.target, |source| source.display().to_string());
                diagnosis::explain(proc, StartFailure { target, ..failure })
            }
            step::OPEN_LAYER => {
                let target =
                    self.layer_in(&failure.target).map_or(failure.target, |folder| folder.display().to_string());
                diagnosis::explain(proc, StartFailure { target, ..failure })
            }
            _ => diagnosis::explain(proc, failure),
        }
    }

    fn of_words(self, proc: &Path, output: String) -> SandboxError {
        let mut words = output.to_lowercase();
        for name in &self.names {
            words = words.replace(name, "it");
        }
        let (fault, cause, advice) = self.understand(proc, &words);
        SandboxError::Launcher { program: self.program, fault, cause, advice, output }
    }

    /// Returns what was in the way, from what was said in lower-case letters.
    fn understand(&self, proc: &Path, words: &str) -> (LauncherFault, String, String) {
        let says = |parts: &[&str]| parts.iter().any(|part| words.contains(part));
        let image = self.image.display();
        let told = |fault, cause: String, advice: &str| (fault, cause, advice.to_owned());
        let unpacked = "or use an unpacked directory, which needs no FUSE";
        if says(&["failed to create user namespace", "user namespaces are", "create namespace"]) {
            let errno = if says(&["exceeded", "no space left"]) { libc::ENOSPC } else { libc::EPERM };
            if let Some((cause, advice)) = diagnosis::blocked_by(proc, step::NAMESPACES, errno) {
                return told(LauncherFault::UserNamespaces, cause, advice);
            }
        }
        if says(&["no space left on device", "disk quota exceeded", "cannot allocate memory", "out of memory"])
            || says(&["resource temporarily unavailable", "too many open files"])
        {
            let advice = "free some space (disk and memory), or raise the limit that its last words name";
            return told(LauncherFault::Exhausted, "this machine has no more of what it needs".to_owned(), advice);
        }
        if says(&["image format not recognized"]) {
            let advice = "name an unpacked directory, a .sif or a squashfs";
            return told(LauncherFault::Image, format!("{image} is no image that it knows"), advice);
        }
        if says(&["not readable by the current user"]) {
            let advice = "open it, and the folders above it, to that user (chmod -R a+rX)";
            return told(LauncherFault::Image, format!("image {image} is closed to {}", self.user), advice);
        }
        if says(&["read the squashfs image", "squashfs superblock", "corrupt"]) {
            let advice = "build it again, or copy it again";
            return told(LauncherFault::Image, format!("image {image} is damaged or cut short"), advice);
        }
        if says(&["could not open image"]) {
            let advice = "see that it is there and open to that user";
            return told(LauncherFault::Image, format!("image {image} cannot be opened by {}", self.user), advice);
        }
        if says(&["/dev/fuse"]) {
            let advice = format!("ask for a /dev/fuse that everybody may open (chmod 666 /dev/fuse), {unpacked}");
            return told(LauncherFault::Fuse, "FUSE is forbidden here: /dev/fuse cannot be opened".to_owned(), &advice);
        }
        if says(&["fuse"]) {
            let advice = format!("see that squashfuse is installed and that /dev/fuse is a FUSE device, {unpacked}");
            return told(LauncherFault::Fuse, format!("image {image} cannot be mounted by FUSE"), &advice);
        }
        if let Some(source) = self.bind_in(words) {
            let cause = format!("bind source {} cannot be shown by {}", source.display(), self.user);
            return told(LauncherFault::Bind, cause, "see that it is there and open to that user");
        }
        if let Some(folder) = self.layer_in(words) {
            let cause = format!("layer {} cannot be shown by {}", folder.display(), self.user);
            let advice = "open the store, and the folders above it, to that user (chmod a+rX)";
            return told(LauncherFault::Image, cause, advice);
        }
        if says(&["newuidmap", "newgidmap", "subuid", "subgid", "fakeroot"]) {
            let advice = "mend what its last words name, or start without fake root";
            return told(LauncherFault::FakeRoot, "a fake root gets no ids here".to_owned(), advice);
        }
        if says(&["unknown flag", "unknown shorthand"]) {
            let advice = "install Apptainer 1.1 or SingularityCE 3.11, or later";
            return told(LauncherFault::Other, "this version lacks a flag that is needed".to_owned(), advice);
        }
        let advice =
            format!("start it by hand as {} to see more: {} exec IMAGE true", self.user, self.program.display());
        told(LauncherFault::Other, "it did not start the guest".to_owned(), &advice)
    }

    /// Returns the source of the bind that is spoken of, which has a plain name in every argument.
    fn bind_in(&self, words: &str) -> Option<&Path> {
        self.binds.get(number_in(words, "binds")?).map(|bind| bind.source.as_path())
    }

    /// Returns the layer that is spoken of.
    fn layer_in(&self, words: &str) -> Option<&Path> {
        self.layers.get(number_in(words, "layers")?).map(PathBuf::as_path)
    }
}

/// Returns the number of a thing in the guest's own folder that is spoken of.
fn number_in(words: &str, kind: &str) -> Option<usize> {
    let (_, rest) = words.split_once(&format!("{OWN_FOLDER}/{kind}/"))?;
    rest.split(|char: char| !char.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use LauncherFault::{Bind as BindFault, Exhausted, FakeRoot, Fuse, Image as ImageFault, Other, UserNamespaces};

    use super::*;
    use crate::{Image, SandboxUser};

    fn explain(step: &str, words: &str) -> SandboxError {
        explain_of("/images/a.sif", "/run/x", step, words)
    }

    fn explain_of(image: &str, folder: &str, step: &str, words: &str) -> SandboxError {
        let bind = |source: &str| Bind { source: source.into(), target: "/x".into(), writable: false };
        let binds = vec![bind("/one"), bind("/two")];
        // Files that are there, or there would be no set-up; what is made of it is told apart by its names alone.
        let plain = SandboxSpec::new("/proc/self/exe").to_setup(Some(SandboxUser { uid: 7, gid: 7 })).unwrap();
        let setup = Setup { image: setup::Image::File(image.into()), layers: vec!["/store/l/root".into()], ..plain };
        let spec = SandboxSpec { image: Image::File(image.into()), binds, ..SandboxSpec::new("/guest") };
        let explain = Explain::new("/bin/apptainer".into(), &spec, &setup, Path::new(folder));
        let failure = StartFailure { step: step.to_owned(), target: words.to_owned(), errno: 0 };
        explain.explain(Path::new("/nonexistent"), failure)
    }

    /// As Apptainer 1.4.5 says them.
    #[test]
    fn words_of_a_launcher_are_understood() {
        let cases = [
            (
                "ERROR  : Failed to create user namespace: maximum number of user namespaces exceeded, check \
                 /proc/sys/user/max_user_namespaces",
                UserNamespaces,
                "max_user_namespaces",
            ),
            (
                "FATAL:   While checking container encryption: could not open image /run/x/image: failed to retrieve path \
                 for /run/x/image: lstat /images/a.sif: no such file or directory",
                ImageFault,
                "/images/a.sif cannot be opened",
            ),
            (
                "FATAL:   While checking container encryption: could not open image /x: image format not recognized",
                ImageFault,
                "/images/a.sif is no image",
            ),
            (
                "FATAL:   While checking container encryption: could not open image /x: /x is not readable by the current \
                 user, check permissions",
                ImageFault,
                "closed to user 7",
            ),
            (
                "FATAL:   container creation failed: image driver mount failure: image driver squashfuse_ll instance exited \
                 with error: squashfuse_ll exited: Something went wrong trying to read the squashfs image.",
                ImageFault,
                "damaged",
            ),
            (
                "FATAL:   container creation failed: image driver mount failure: image driver squashfuse_ll instance exited \
                 with error: squashfuse_ll exited: fuse: failed to open /dev/fuse: Permission denied",
                Fuse,
                "/dev/fuse cannot be opened",
            ),
            (
                "FATAL:   container creation failed: image driver mount failure: image driver squashfuse_ll instance exited \
                 with error: squashfuse_ll exited: fuse: mount failed: Invalid argument",
                Fuse,
                "unpacked directory",
            ),
            (
                "FATAL:   container creation failed: mount hook function failure: mount /nope->/.prorl/binds/1 error: while \
                 mounting /nope: mount source /nope doesn't exist",
                BindFault,
                "bind source /two",
            ),
            (
                "FATAL:   container creation failed: mount hook function failure: mount /nope->/.prorl/layers/0 error: while \
                 mounting /nope: mount source /nope doesn't exist",
                ImageFault,
                "layer /store/l/root cannot be shown by user 7",
            ),
            ("FATAL:   while extracting image: write /x: no space left on device", Exhausted, "no more"),
            ("FATAL:   could not use fakeroot: no mapping entry found in /etc/subuid for x", FakeRoot, "last words"),
            ("Error for command \"exec\": unknown flag: --no-umask", Other, "Apptainer 1.1"),
            ("FATAL:   something new", Other, "/bin/apptainer exec IMAGE true"),
        ];
        for (words, fault, part) in cases {
            let error = explain(step::LAUNCH, words);
            let text = error.to_string();
            let SandboxError::Launcher { fault: found, output, .. } = error else { panic!("{text}") };
            assert_eq!((found, output.as_str()), (fault, words));
            assert!(text.contains(part) && text.ends_with(words), "{text}");
        }
    }

    #[test]
    fn names_of_files_are_no_words() {
        let cases = [
            (
                "/x/Corrupt/fuse/d.sqfs",
                "/tmp/run",
                "could not open image /tmp/run/image: /x/Corrupt/fuse/d.sqfs is not readable by the current user",
                "is closed to user 7",
            ),
            ("/x/corrupt.sif", "/tmp/run", "something new about /x/corrupt.sif", "it did not start the guest"),
            ("/x/a.sif", "/scratch/fakeroot/run", "see /scratch/fakeroot/run/image", "it did not start the guest"),
            ("/x/a.sif", "/fuse-images/run", "/fuse-images/run/image: no space left on device", "no more"),
        ];
        for (image, folder, words, part) in cases {
            let text = explain_of(image, folder, step::LAUNCH, words).to_string();
            assert!(text.contains(part) && text.ends_with(words), "{text}");
        }
    }

    #[test]
    fn the_guests_own_failures_are_told_in_the_specs_words() {
        let error = explain(step::OPEN_BIND, "/.prorl/binds/0");
        assert_eq!(error.to_string(), "failed to open bind source /one");
        let error = explain(step::OPEN_LAYER, "/.prorl/layers/0");
        assert_eq!(error.to_string(), "failed to open image /store/l/root");
        assert_eq!(explain(step::MOUNT, "it").to_string(), "failed to set up the sandbox at: mount it");
        assert!(matches!(explain(step::EXECUTE_LAUNCHER, "it"), SandboxError::Program { .. }));
    }
}
