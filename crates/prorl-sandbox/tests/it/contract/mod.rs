//! What every runtime promises, tested on each of them by the same code: an image of a folder that the running user owns.
//!
//! The few things that only one runtime has are tested beside it.

mod ending;
mod inside;
pub(crate) mod limits;

pub(crate) use ending::assert_no_trace;

use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    sync::Arc,
};

use prorl_sandbox::{
    Image, NamespaceConfig, NamespaceRuntime, Node, Runtime, SandboxError, SandboxSpec, SingularityConfig,
    SingularityRuntime,
};

use crate::support::{LONG, Live, fresh_node, image_with, is_root, pack, sandbox_uid, skip, spec};

/// A runtime and an image for it.
pub(crate) struct Ground {
    pub(crate) name: &'static str,
    pub(crate) node: Node,
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) image: tempfile::TempDir,
    /// The same image packed in a file of that name, in a folder that goes with the ground, if that is what is used.
    packed: Option<(PathBuf, tempfile::TempDir)>,
}

impl Ground {
    #[expect(clippy::unnecessary_wraps, reason = "the other grounds may be missing")]
    pub(crate) fn namespace(_: &str) -> Option<Self> {
        let node = fresh_node();
        let runtime = Arc::new(NamespaceRuntime::new(node.clone(), NamespaceConfig::default()));
        Some(Self { name: "namespace", node, runtime, image: own_image(), packed: None })
    }

    /// Says so and returns nothing where there is no Apptainer.
    pub(crate) fn singularity(test: &str) -> Option<Self> {
        let node = fresh_node();
        match SingularityRuntime::new(node.clone(), SingularityConfig::default()) {
            Ok(runtime) => {
                let (runtime, image) = (Arc::new(runtime), own_image());
                Some(Self { name: "singularity", node, runtime, image, packed: None })
            }
            Err(error) => {
                skip(test, &format!("{error:?}"));
                None
            }
        }
    }

    /// The same with the image in a file, where such a file can be made and mounted.
    pub(crate) fn packed(test: &str) -> Option<Self> {
        let mut ground = Self::singularity(test)?;
        if File::options().read(true).write(true).open("/dev/fuse").is_err() {
            skip(test, "/dev/fuse is closed here");
            return None;
        }
        let folder = open_folder();
        let [squashfs, _] = pack(test, ground.image.path(), folder.path())?;
        (ground.name, ground.packed) = ("packed", Some((squashfs, folder)));
        Some(ground)
    }

    pub(crate) fn spec(&self) -> SandboxSpec {
        let image = match &self.packed {
            Some((file, _)) => Image::File(file.clone()),
            None => Image::Directory(self.image.path().to_owned()),
        };
        SandboxSpec { image, start_timeout: LONG, ..spec() }
    }

    fn fakeroot(&self) -> SandboxSpec {
        SandboxSpec { fakeroot: true, ..self.spec() }
    }

    pub(crate) async fn start(&self, spec: &SandboxSpec) -> Live {
        Live::start_on(&*self.runtime, spec).await
    }

    async fn refusal(&self, spec: &SandboxSpec) -> SandboxError {
        self.runtime.start(spec).await.expect_err("this must not start")
    }
}

/// Programs that tests change and compare files by. One that this machine lacks is not in the image.
const LAYERED: [&str; 14] =
    ["cksum", "cp", "df", "find", "getcap", "ln", "mkfifo", "mv", "perl", "rmdir", "setcap", "sort", "truncate", "wc"];

/// An image whose files are the sandboxes' user's.
fn own_image() -> tempfile::TempDir {
    let image = image_with(&LAYERED);
    if is_root() {
        let owner = format!("{0}:{0}", sandbox_uid());
        let changed = std::process::Command::new("chown").args(["-hR", &owner]).arg(image.path()).status().unwrap();
        assert!(changed.success());
    }
    image
}

/// A folder that every user may look into.
pub(crate) fn open_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

/// A process that does not outlive a test that fails.
pub(crate) struct KilledOnDrop(pub(crate) std::process::Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Makes a test of each function for each runtime, and for image files.
macro_rules! contract {
    ($($module:ident::$name:ident),* $(,)?) => {
        mod namespace {
            $(#[tokio::test]
            async fn $name() {
                if let Some(ground) = super::Ground::namespace(stringify!($name)) {
                    super::$module::$name(&ground).await;
                }
            })*
        }

        mod singularity {
            $(#[tokio::test]
            async fn $name() {
                if let Some(ground) = super::Ground::singularity(stringify!($name)) {
                    super::$module::$name(&ground).await;
                }
            })*
        }

        mod packed {
            $(#[tokio::test]
            async fn $name() {
                if let Some(ground) = super::Ground::packed(stringify!($name)) {
                    super::$module::$name(&ground).await;
                }
            })*
        }
    };
}

contract! {
    inside::the_image_is_the_root_and_is_never_written_to,
    inside::the_layer_and_the_temporary_folders_are_limited,
    inside::binds_show_what_is_named_and_no_more,
    inside::binds_go_where_the_images_links_lead,
    inside::binds_go_into_the_temporary_folders,
    inside::names_of_any_bytes_are_taken,
    inside::a_hosts_umask_stays_outside,
    inside::the_user_is_ones_own,
    inside::a_fake_root_is_root_inside_alone,
    inside::the_environment_is_clean_and_as_ordered,
    inside::the_working_folder_and_the_home_are_writable,
    inside::without_network_there_is_a_loopback_of_its_own,
    inside::on_the_hosts_network_each_has_an_address_of_its_own,
    inside::exit_codes_and_signals_pass,
    inside::files_terminals_cores_and_namespaces_are_limited,
    inside::nothing_of_the_host_is_in_reach,
    inside::the_guest_cannot_be_opened_from_inside,
    inside::the_kernels_settings_and_roots_things_are_out_of_reach,
    limits::tasks_run_on_as_many_processors_as_the_limit_says_and_know_it,
    ending::nothing_is_left_after_a_shutdown,
    ending::a_guest_that_does_not_answer_is_killed_after_the_grace,
    ending::a_dropped_sandbox_dies,
    ending::a_start_that_is_dropped_leaves_nothing,
    ending::the_death_of_process_1_ends_it,
    ending::the_death_of_the_outer_process_ends_it,
    ending::the_death_of_the_host_ends_it,
    ending::a_life_is_finite,
    inside::an_image_without_a_shell_will_do,
    inside::what_is_missing_or_closed_is_named,
}
