//! What the handlers of one server share.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use dashmap::DashMap;
use prorl_core::{FailureClass, JobRequest, Malformed, request::CommonFields, request::NetworkChoice};
use prorl_llm::{pool::Pool, tokenizer::ChatTokenizer};
use prorl_pipeline::{JobContext, StageError};
use prorl_sandbox::{Image, Network, Runtime, SandboxSpec};
use tokio::sync::OnceCell;

use crate::{Runtimes, runtimes::HOST_IMAGE};

/// Which paths a request may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PathPolicy {
    /// Any.
    Any,
    /// Those below one of these folders.
    Below(Vec<PathBuf>),
}

impl PathPolicy {
    /// Checks a path from a request; returns it with links resolved.
    ///
    /// # Errors
    /// Says why it may not be opened.
    pub fn check(&self, path: &Path) -> Result<PathBuf, String> {
        let resolved = path.canonicalize().map_err(|err| format!("{} cannot be opened: {err}", path.display()))?;
        match self {
            Self::Any => Ok(resolved),
            Self::Below(roots) => {
                let allowed = roots.iter().filter_map(|root| root.canonicalize().ok());
                if allowed.into_iter().any(|root| resolved.starts_with(root)) {
                    Ok(resolved)
                } else {
                    Err(format!("{} is not below a folder that the server allows", path.display()))
                }
            }
        }
    }
}

/// Tokenizers of requests' own that are kept loaded at most.
const MAX_NAMED_TOKENIZERS: usize = 8;

/// Limits that are not a job's own.
#[derive(Clone, Debug)]
pub struct CallLimits {
    /// One tool call, whole.
    pub tool_total: Duration,
    /// One bash call without output.
    pub bash_silence: Duration,
    /// One LLM call. It is also held to [`LLM_SHARE`] of the job's budget.
    pub llm_call: Duration,
    /// Waiting for a backend, all in all.
    pub backend_wait: Duration,
    /// Starting a sandbox.
    pub sandbox_start: Duration,
}

/// The share of a job's whole budget that one LLM call may use.
///
/// A generation is silent until it is done, so a backend that hangs cannot be told from a slow one but by time. A call
/// that alone used up this much ends as a failure of the backend, not as a timeout of the job.
pub const LLM_SHARE: f64 = 0.8;

impl Default for CallLimits {
    fn default() -> Self {
        Self {
            tool_total: Duration::from_mins(2),
            bash_silence: Duration::from_secs(30),
            llm_call: Duration::from_mins(10),
            backend_wait: Duration::from_hours(1),
            sandbox_start: Duration::from_secs(30),
        }
    }
}

/// What the handlers of one server share: where sandboxes and generations come from.
pub struct Environment {
    /// What makes sandboxes.
    pub runtimes: Runtimes,
    /// The guest program.
    pub guest: PathBuf,
    /// The LLM servers.
    pub pool: Pool,
    /// The tokenizer of requests that name none.
    pub tokenizer: ChatTokenizer,
    /// Tokenizers that requests named, by resolved path; a few at most.
    named_tokenizers: DashMap<PathBuf, Arc<OnceCell<ChatTokenizer>>>,
    /// Which paths requests may name.
    pub paths: PathPolicy,
    /// Whether a sandbox may share the host's network.
    pub allow_host_network: bool,
    /// Limits of single calls.
    pub limits: CallLimits,
}

impl Environment {
    /// Makes an environment with default limits, for requests on a trusted listener.
    pub fn new(runtimes: impl Into<Runtimes>, guest: impl Into<PathBuf>, pool: Pool, tokenizer: ChatTokenizer) -> Self {
        Self {
            runtimes: runtimes.into(),
            guest: guest.into(),
            pool,
            tokenizer,
            named_tokenizers: DashMap::new(),
            paths: PathPolicy::Any,
            allow_host_network: false,
            limits: CallLimits::default(),
        }
    }

    /// Checks what every handler's requests share: paths, runtime and network.
    ///
    /// # Errors
    /// Names the field.
    pub fn check(&self, request: &JobRequest) -> Result<(), Malformed> {
        if let Some(name) = &request.sampling_params.tokenizer
            && !self.is_default_tokenizer(name)
        {
            let field = "sampling_params.tokenizer";
            let folder = self.paths.check(Path::new(name)).map_err(|why| Malformed::new(field, why))?;
            if !folder.join("tokenizer.json").is_file() {
                return Err(Malformed::new(field, format!("expected a folder with tokenizer.json, found {name}")));
            }
        }
        let common = request.instance.common().map_err(|problem| {
            let field = format!("instance.{}", problem.field);
            Malformed { field, ..problem }
        })?;
        if common.network == NetworkChoice::Host && !self.allow_host_network {
            let problem = "host is refused by this server; it needs --allow-host-network";
            return Err(Malformed::new("instance.network", problem));
        }
        self.choose(&common).map(drop)
    }

    /// Returns the runtime and the image for an instance.
    fn choose(&self, common: &CommonFields) -> Result<(&Arc<dyn Runtime>, Image), Malformed> {
        let check = |image: &String| match image.as_str() {
            HOST_IMAGE => Ok(PathBuf::from(HOST_IMAGE)),
            "" => Err("expected a path or \"host\", found an empty text".to_owned()),
            url if url.contains("://") => Err(format!(
                "expected the path of an unpacked folder, a .sif or a squashfs, found {url}: build or pull it first"
            )),
            path => self.paths.check(Path::new(path)),
        };
        let named = common.image.as_ref().map(check).transpose();
        let named = named.map_err(|why| Malformed::new("instance.image", why))?;
        self.runtimes.choose(common.runtime, named.as_deref())
    }

    /// Returns the tokenizer that a request asks for, loading it the first time.
    ///
    /// # Errors
    /// When its folder does not load.
    pub async fn tokenizer(&self, job: &JobContext) -> Result<ChatTokenizer, StageError> {
        let Some(name) = job.sampling().tokenizer.as_ref().filter(|name| !self.is_default_tokenizer(name)) else {
            return Ok(self.tokenizer.clone());
        };
        let failed = |why: String| StageError::text(FailureClass::Handler, format!("tokenizer {name}: {why}"));
        let folder = self.paths.check(Path::new(name)).map_err(failed)?;
        if self.named_tokenizers.len() >= MAX_NAMED_TOKENIZERS && !self.named_tokenizers.contains_key(&folder) {
            self.named_tokenizers.clear(); // jobs that use one keep it; the next that names it loads it anew
        }
        let cell = Arc::clone(&self.named_tokenizers.entry(folder.clone()).or_default());
        // Jobs of one folder that come together wait for one load.
        let load = async {
            tokio::task::spawn_blocking(move || ChatTokenizer::load(&folder))
                .await
                .map_err(|join| failed(join.to_string()))?
                .map_err(|err| StageError::new(FailureClass::Handler, &err))
        };
        cell.get_or_try_init(|| load).await.cloned()
    }

    /// Tells whether a request's word for a tokenizer means the server's own: its name, alone or as a hub writes it
    /// (`Qwen/Qwen3-8B`).
    fn is_default_tokenizer(&self, name: &str) -> bool {
        let own = self.tokenizer.name();
        let last = name.rsplit_once('/').map_or(name, |(_, last)| last);
        name == own || (last == own && !Path::new(name).exists())
    }

    /// Returns what to start for a job, its image, network and limits, and the runtime that can.
    ///
    /// # Errors
    /// When the request names something that [`check`](Self::check) refuses, such as an image that is no longer there.
    pub fn sandbox_spec(&self, job: &JobContext) -> Result<(&Arc<dyn Runtime>, SandboxSpec), StageError> {
        let refused = |problem: Malformed| {
            let class = match problem.field.as_str() {
                "instance.image" => FailureClass::Image,
                _ => FailureClass::Handler,
            };
            StageError::text(class, problem.to_string())
        };
        let common = job.instance().common().map_err(refused)?;
        let (runtime, image) = self.choose(&common).map_err(refused)?;
        let mut spec = SandboxSpec::new(&self.guest);
        spec.image = image;
        spec.fakeroot = common.fakeroot;
        if common.network == NetworkChoice::Host {
            spec.network = Network::Host;
        }
        if let Some(disk_mb) = common.limits.disk_mb {
            spec.layer_bytes = disk_mb.saturating_mul(1 << 20);
        }
        if let Some(wall) = common.limits.wall_s {
            spec.max_life = Duration::try_from_secs_f64(wall).unwrap_or(Duration::MAX);
        }
        let unenforced = [
            ("memory_mb", common.limits.memory_mb.is_some()),
            ("pids", common.limits.pids.is_some()),
            ("cpus", common.limits.cpus.is_some()),
        ];
        for (limit, given) in unenforced {
            if given {
                job.warn(format!("instance.limits.{limit} is not enforced by this version"));
            }
        }
        spec.start_timeout = job.remaining(Some(self.limits.sandbox_start));
        Ok((runtime, spec))
    }
}
