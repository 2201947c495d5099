//! Which runtime a job's sandbox is made by.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use prorl_core::{Malformed, request::RuntimeChoice};
use prorl_sandbox::{Image, Runtime};

/// What an instance calls the host's own programs by, where it could also name an image.
pub const HOST_IMAGE: &str = "host";

/// The runtimes of one server, and how a job gets one of them.
///
/// What the instance asks for comes first, then what the server prefers. Where both say `auto`, a packed image (`.sif`,
/// squashfs) that no store unpacks goes to Singularity, everything else to the embedded runtime, which is faster and needs
/// nothing installed.
#[derive(Clone)]
pub struct Runtimes {
    namespace: Arc<dyn Runtime>,
    singularity: Result<Arc<dyn Runtime>, String>,
    preferred: RuntimeChoice,
    default_image: Option<PathBuf>,
}

impl From<Arc<dyn Runtime>> for Runtimes {
    /// The embedded runtime alone.
    fn from(namespace: Arc<dyn Runtime>) -> Self {
        Self {
            namespace,
            singularity: Err("this server has no singularity runtime".to_owned()),
            preferred: RuntimeChoice::Auto,
            default_image: None,
        }
    }
}

impl Runtimes {
    /// Adds the Singularity runtime, or the reason why there is none, which jobs that need it are told.
    #[must_use]
    pub fn with_singularity(mut self, singularity: Result<Arc<dyn Runtime>, String>) -> Self {
        self.singularity = singularity;
        self
    }

    /// Sets the runtime of instances that ask for none.
    #[must_use]
    pub fn preferring(mut self, preferred: RuntimeChoice) -> Self {
        self.preferred = preferred;
        self
    }

    /// Sets the image of instances that name none: a path, or a name of the server's store. Without one it is the host's own
    /// programs.
    #[must_use]
    pub fn with_default_image(mut self, image: Option<PathBuf>) -> Self {
        self.default_image = image;
        self
    }

    /// Returns what instances that name no image get, as results name it: a path, a name of the store, or `host`.
    pub fn default_image(&self) -> String {
        self.default_path().display().to_string()
    }

    pub(crate) fn default_path(&self) -> &Path {
        self.default_image.as_deref().unwrap_or(Path::new(HOST_IMAGE))
    }

    /// Returns the runtime and the image for an instance, without a store. `image` is the one it names, already checked to be
    /// one that it may name: a resolved path, or [`HOST_IMAGE`].
    ///
    /// # Errors
    /// Names the field of the instance that cannot be had, and why.
    pub fn choose(&self, asked: RuntimeChoice, image: Option<&Path>) -> Result<(&Arc<dyn Runtime>, Image), Malformed> {
        let image = match image.or(self.default_image.as_deref()) {
            None => Image::Host,
            Some(path) if path == Path::new(HOST_IMAGE) => Image::Host,
            Some(path) if path.is_dir() => Image::Directory(path.to_owned()),
            Some(path) if path.is_file() => Image::File(path.to_owned()),
            Some(path) => {
                let problem =
                    format!("expected an unpacked image folder, a .sif or a squashfs, found {}", path.display());
                return Err(Malformed::new("instance.image", problem));
            }
        };
        Ok((self.of(asked, Form::of(&image))?, image))
    }

    /// Returns the runtime for an instance whose image is of this form.
    ///
    /// # Errors
    /// As [`choose`](Self::choose).
    pub(crate) fn of(&self, asked: RuntimeChoice, form: Form) -> Result<&Arc<dyn Runtime>, Malformed> {
        let refused = |field: &str, why: String| Err(Malformed::new(format!("instance.{field}"), why));
        let choice = if asked == RuntimeChoice::Auto { self.preferred } else { asked };
        if choice == RuntimeChoice::Namespace && form == Form::Packed {
            let why = "a packed image needs the singularity runtime; the namespace runtime takes an unpacked folder";
            return refused("image", why.to_owned());
        }
        if choice != RuntimeChoice::Singularity && form != Form::Packed {
            return Ok(&self.namespace);
        }
        if form == Form::Host {
            return refused("image", "expected one: the singularity runtime has no image of its own".to_owned());
        }
        match &self.singularity {
            Ok(singularity) => Ok(singularity),
            Err(why) => refused("runtime", why.clone()),
        }
    }
}

/// What decides which runtimes can start an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// The host's own programs.
    Host,
    /// A folder, of a store or not.
    Unpacked,
    /// A file, where no store unpacks it.
    Packed,
}

impl Form {
    pub(crate) fn of(image: &Image) -> Self {
        match image {
            Image::Host => Self::Host,
            Image::Directory(_) | Image::Stored(_) => Self::Unpacked,
            Image::File(_) => Self::Packed,
        }
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use prorl_sandbox::{Sandbox, SandboxError, SandboxSpec};

    use super::*;

    struct Named(&'static str);

    #[async_trait]
    impl Runtime for Named {
        fn name(&self) -> &str {
            self.0
        }

        async fn start(&self, _: &SandboxSpec) -> Result<Sandbox, SandboxError> {
            Err(SandboxError::Invalid { what: "runtime", reason: "starts nothing".to_owned() })
        }
    }

    fn runtimes() -> Runtimes {
        let namespace: Arc<dyn Runtime> = Arc::new(Named("namespace"));
        Runtimes::from(namespace).with_singularity(Ok(Arc::new(Named("singularity"))))
    }

    #[test]
    fn an_instance_comes_before_the_server_and_the_image_decides_the_rest() {
        use RuntimeChoice::{Auto, Namespace, Singularity};
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("image.sif");
        std::fs::write(&file, "").unwrap();
        let (dir, packed, none) = (Some(folder.path()), Some(file.as_path()), None);
        for (preferred, asked, image, expected) in [
            (Auto, Auto, none, Ok("namespace")),
            (Auto, Auto, dir, Ok("namespace")),
            (Auto, Auto, packed, Ok("singularity")),
            (Auto, Singularity, dir, Ok("singularity")),
            (Auto, Singularity, none, Err("instance.image")),
            (Auto, Namespace, packed, Err("instance.image")),
            (Singularity, Auto, dir, Ok("singularity")),
            (Singularity, Auto, none, Err("instance.image")),
            (Singularity, Namespace, none, Ok("namespace")),
            (Namespace, Auto, packed, Err("instance.image")),
            (Namespace, Singularity, packed, Ok("singularity")),
            (Auto, Auto, Some(Path::new(HOST_IMAGE)), Ok("namespace")),
        ] {
            let runtimes = runtimes().preferring(preferred);
            let chosen = runtimes.choose(asked, image).map(|(runtime, _)| runtime.name().to_owned());
            let chosen = chosen.map_err(|problem| problem.field);
            assert_eq!(chosen, expected.map(str::to_owned).map_err(str::to_owned), "{preferred:?} {asked:?} {image:?}");
        }
    }

    #[test]
    fn the_reason_for_no_singularity_reaches_the_job() {
        let folder = tempfile::tempdir().unwrap();
        let runtimes = runtimes().with_singularity(Err("apptainer is not on PATH".to_owned()));
        let Err(problem) = runtimes.choose(RuntimeChoice::Singularity, Some(folder.path())) else {
            panic!("there is none");
        };
        assert_eq!(
            (problem.field.as_str(), problem.problem.as_str()),
            ("instance.runtime", "apptainer is not on PATH")
        );
        let default = runtimes.with_default_image(Some(folder.path().to_owned()));
        let (_, image) = default.choose(RuntimeChoice::Auto, None).unwrap();
        assert_eq!(image, Image::Directory(folder.path().to_owned()));
        let (_, image) = default.choose(RuntimeChoice::Auto, Some(Path::new(HOST_IMAGE))).unwrap();
        assert_eq!(image, Image::Host);
    }
}
