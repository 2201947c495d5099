//! Sandboxes that are frozen, and sandboxes that start on what others have written.

mod files;
mod identity;
mod ids;
mod refusals;
mod store;

use std::{fs, path::Path, process::Command};

use prorl_sandbox::{
    SandboxSpec,
    store::{ImageStore, Layer, StoreConfig},
};

use crate::{
    contract::{Ground, open_folder},
    support::{LONG, Live, spec},
};

/// A ground, what sandboxes on it are, and a store that goes with them.
pub(crate) struct Field {
    ground: Ground,
    spec: SandboxSpec,
    store: ImageStore,
    _folder: tempfile::TempDir,
}

impl Field {
    fn new(ground: Ground, spec: SandboxSpec) -> Self {
        let folder = open_folder();
        let store = ImageStore::open(StoreConfig::new(folder.path().join("a:b,c\\store"))).unwrap();
        Self { spec: SandboxSpec { freezable: true, start_timeout: LONG, ..spec }, ground, store, _folder: folder }
    }

    /// Among the host's own programs.
    fn host(test: &str) -> Option<Self> {
        Some(Self::new(Ground::namespace(test)?, spec()))
    }

    /// On an image.
    fn on(ground: Option<Ground>) -> Option<Self> {
        let ground = ground?;
        let spec = ground.spec();
        Some(Self::new(ground, spec))
    }

    /// The same with a fake root, and a store of its own.
    fn fakeroot(self) -> Self {
        Self::new(self.ground, SandboxSpec { fakeroot: true, ..self.spec })
    }

    fn has_image(&self) -> bool {
        self.spec.image != prorl_sandbox::Image::Host
    }

    async fn start(&self, layers: &[&Layer]) -> Live {
        let layers = layers.iter().map(|layer| (*layer).clone()).collect();
        self.ground.start(&SandboxSpec { layers, ..self.spec.clone() }).await
    }

    async fn freeze(&self, live: &Live) -> Layer {
        let layer = live.sandbox.freeze(&self.store).await.unwrap_or_else(|error| panic!("{error}: {error:?}"));
        crate::contract::assert_no_trace(&self.ground, live);
        layer
    }

    /// Runs a script in a fresh sandbox and freezes that.
    async fn layer(&self, script: &str) -> Layer {
        let live = self.start(&[]).await;
        assert_eq!(live.sh(script).await, "");
        self.freeze(&live).await
    }
}

/// Everything that can be seen of a tree from outside, when it was changed last too.
fn outside(root: &Path) -> String {
    let format = "%p|%y|%m|%U|%G|%T@|%C@|%l|%s|%n\n";
    let listed = Command::new("find").arg(root).args(["-printf", format]).output().unwrap();
    let mut lines: Vec<_> = String::from_utf8_lossy(&listed.stdout).lines().map(str::to_owned).collect();
    lines.sort();
    assert!(!lines.is_empty());
    lines.join("\n")
}

/// What is in a store of layers.
fn layers_in(store: &ImageStore) -> usize {
    fs::read_dir(store.dir().join("layers")).unwrap().count()
}

/// Makes a test of each function for the host's programs, an image in a folder by both runtimes, and an image file; each as the
/// user and as a fake root.
macro_rules! fields {
    ($($module:ident::$name:ident),* $(,)?) => {
        fields!(@ host, super::Field::host, $($module::$name),*);
        fields!(@ folder, |test| super::Field::on(super::Ground::namespace(test)), $($module::$name),*);
        fields!(@ launched, |test| super::Field::on(super::Ground::singularity(test)), $($module::$name),*);
        fields!(@ packed, |test| super::Field::on(super::Ground::packed(test)), $($module::$name),*);
    };
    (@ $field:ident, $make:expr, $($module:ident::$name:ident),*) => {
        mod $field {
            $(#[tokio::test]
            async fn $name() {
                let make: fn(&str) -> Option<super::Field> = $make;
                if let Some(field) = make(stringify!($name)) {
                    super::$module::$name(&field).await;
                    super::$module::$name(&field.fakeroot()).await;
                }
            })*
        }
    };
}

fields! {
    files::all_that_was_written_is_there_again,
    files::many_start_from_one_and_none_sees_another,
    files::nothing_is_copied,
    identity::each_has_a_name_and_addresses_of_its_own,
    identity::settings_that_were_changed_stay,
    identity::users_and_fake_roots_start_from_each_others_layers,
    refusals::what_runs_is_named_and_may_end,
    refusals::a_layer_means_nothing_elsewhere,
}
