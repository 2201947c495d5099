use std::{io, path::Path, time::Duration};

use async_trait::async_trait;

use crate::{
    Image, Node, Runtime, Sandbox, SandboxError, SandboxSpec, SandboxUser, diagnosis,
    node::Reach,
    setup::Order,
    start::{self, Kind, Orders},
};

/// The outer process allows the guest 200 ms of that.
const KIND: Kind = Kind { name: "namespace", reach: Reach::PidNamespace, collapse: Duration::from_millis(500) };

/// How a [`NamespaceRuntime`] works.
#[derive(Clone, Debug, Default)]
pub struct NamespaceConfig {
    /// The host user that sandboxes run as when they are started by root; `nobody` by default. An ordinary user's
    /// sandboxes run as that user, whatever is said here.
    pub sandbox_user: Option<SandboxUser>,
}

/// Sandboxes made from the kernel's namespaces alone: nothing to install, no privilege needed.
///
/// The guest makes its own namespaces, mounts and limits, because a program with threads cannot enter a user namespace. What
/// is started is one process that waits outside the new pid namespace, and the guest itself as process 1 inside. When
/// either dies, or the channel to the host closes, everything inside dies.
#[derive(Clone, Debug)]
pub struct NamespaceRuntime {
    node: Node,
    config: NamespaceConfig,
}

impl NamespaceRuntime {
    /// Makes a runtime whose sandboxes belong to `node`. It holds nothing else of the system until the first start.
    pub fn new(node: Node, config: NamespaceConfig) -> Self {
        Self { node, config }
    }
}

#[async_trait]
impl Runtime for NamespaceRuntime {
    fn name(&self) -> &'static str {
        KIND.name
    }

    async fn start(&self, spec: &SandboxSpec) -> Result<Sandbox, SandboxError> {
        let setup = spec.to_setup(start::become_user(self.config.sandbox_user)?)?;
        if let Image::File(path) = &spec.image {
            let why = "the namespace runtime mounts no image files: unpack it into a directory (unsquashfs, or \
                       apptainer build --sandbox), or use the singularity runtime";
            let source = io::Error::new(io::ErrorKind::Unsupported, why);
            return Err(SandboxError::Image { path: path.clone(), source });
        }
        let orders = |_: &_, setup| {
            let explain = Box::new(|failure| diagnosis::explain(Path::new("/proc"), failure));
            Ok(Orders { frames: vec![Order::Enter(setup)], has_launcher: false, explain })
        };
        start::start(&self.node, KIND, spec, setup, orders).await
    }
}
