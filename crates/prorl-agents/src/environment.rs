//! What the handlers of one server share.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::Duration,
};

use dashmap::DashMap;
use prorl_core::{FailureClass, Instance, JobRequest, Malformed, NetworkChoice, request::CommonFields};
use prorl_llm::{pool::Pool, tokenizer::ChatTokenizer};
use prorl_pipeline::{JobContext, StageError};
use prorl_sandbox::{Image, Network, Runtime, SandboxSpec, images::Unpacker, store::StoredImage};
use tokio::sync::OnceCell;

use crate::{
    EgressPolicy, Runtimes, SandboxDefaults,
    egress::Way,
    images::{self, Found, NotUnpacked},
    runtimes::{Form, HOST_IMAGE},
};

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
    /// What unpacks images, and the store that it unpacks them to. With one, instances may name its images, packed ones run
    /// without FUSE, and the jobs of a group can share what they start from.
    pub unpacker: Option<Unpacker>,
    /// The image of instances that name none, from when it was first needed on, where it is in the store. It is held, so that
    /// no collection removes it, and used by itself, so that a name that comes to mean another image changes nothing.
    default_image: OnceLock<StoredImage>,
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
    /// Whether a sandbox may reach hosts that its job names, and how.
    pub egress: EgressPolicy,
    /// Limits of single calls.
    pub limits: CallLimits,
    /// What sandboxes may use whose instances do not say.
    pub sandboxes: SandboxDefaults,
}

impl Environment {
    /// Makes an environment with default limits, for requests on a trusted listener.
    pub fn new(runtimes: impl Into<Runtimes>, guest: impl Into<PathBuf>, pool: Pool, tokenizer: ChatTokenizer) -> Self {
        Self {
            runtimes: runtimes.into(),
            guest: guest.into(),
            unpacker: None,
            default_image: OnceLock::new(),
            pool,
            tokenizer,
            named_tokenizers: DashMap::new(),
            paths: PathPolicy::Any,
            allow_host_network: false,
            egress: EgressPolicy::default(),
            limits: CallLimits::default(),
            sandboxes: SandboxDefaults::default(),
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
        let common = request.instance.common().map_err(of_instance)?;
        if common.network == NetworkChoice::Host && !self.allow_host_network {
            let problem = "host is refused by this server; it needs --allow-host-network";
            return Err(Malformed::new("instance.network", problem));
        }
        self.egress.way(&common.network)?;
        self.sandboxes.with(&common.limits).check().map_err(of_instance)?;
        let found = self.find(&common)?;
        self.runtime(&common, self.form_of(&found)).map(drop)
    }

    /// Finds the image that an instance names, or the server's own.
    fn find(&self, common: &CommonFields) -> Result<Found, Malformed> {
        if common.image.is_none()
            && let Some(image) = self.default_image.get()
        {
            return Ok(Found::Stored(image.clone()));
        }
        let store = self.unpacker.as_ref().map(|unpacker| &unpacker.store);
        let found = match &common.image {
            Some(text) => images::find(Path::new(text), &self.paths, store),
            // Whoever runs the server may name any path.
            None => images::find(self.runtimes.default_path(), &PathPolicy::Any, store),
        };
        found.map_err(|why| Malformed::new("instance.image", why))
    }

    /// Returns the runtime for an instance whose image is of this form.
    fn runtime(&self, common: &CommonFields, form: Form) -> Result<&Arc<dyn Runtime>, Malformed> {
        self.runtimes.of(common.runtime, form)
    }

    fn form_of(&self, found: &Found) -> Form {
        match found {
            Found::Host => Form::Host,
            Found::Packed(_) if self.unpacker.is_none() => Form::Packed,
            Found::Packed(_) | Found::Stored(_) | Found::Folder(_) => Form::Unpacked,
        }
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

    /// Returns the image that a job's sandbox starts from, and the runtime that starts it. With a store a packed image is
    /// unpacked first, once for all jobs; the image of a store is kept there as long as what this returns is held. Where the
    /// store cannot be written, a packed image is used as it is by a runtime that can, and the result says so.
    ///
    /// # Errors
    /// When the request names something that [`check`](Self::check) refuses, such as an image that is no longer there, and
    /// when it cannot be unpacked.
    ///
    /// # Cancel safety
    /// Dropping it ends the unpacking, unless another job waits for it too.
    pub async fn image(&self, job: &JobContext) -> Result<(&Arc<dyn Runtime>, Image), StageError> {
        let common = job.instance().common().map_err(|problem| refused(&problem))?;
        let found = self.find(&common).map_err(|problem| refused(&problem))?;
        self.started_from(&common, found, |warning| job.warn(warning)).await
    }

    /// Returns the image that was found as a sandbox starts from it, and the runtime.
    async fn started_from(
        &self,
        common: &CommonFields,
        found: Found,
        warn: impl FnOnce(String),
    ) -> Result<(&Arc<dyn Runtime>, Image), StageError> {
        let runtime = self.runtime(common, self.form_of(&found)).map_err(|problem| refused(&problem))?;
        match found.unpacked(self.unpacker.as_ref()).await {
            Ok(Image::Stored(image)) if common.image.is_none() => {
                Ok((runtime, Image::Stored(self.default_image.get_or_init(|| image).clone())))
            }
            Ok(image) => Ok((runtime, image)),
            Err(NotUnpacked { error, file }) => {
                let as_it_is = file.zip(self.runtime(common, Form::Packed).ok());
                let Some((file, runtime)) = as_it_is else { return Err(error) };
                warn(format!("image {} is used packed: {}", file.display(), error.message));
                Ok((runtime, Image::File(file)))
            }
        }
    }

    /// Returns the name of an instance's image, as results tell it.
    pub(crate) fn image_name(&self, instance: &Instance) -> String {
        let named = instance.common().ok().and_then(|common| common.image);
        named.unwrap_or_else(|| self.runtimes.default_image())
    }

    /// Returns what a job is started with that asks for nothing, and the runtime that starts it; nothing where such a job is
    /// refused, because each has to name an image. From then on all such jobs start from that very image, which the store does
    /// not remove while this environment lives.
    ///
    /// # Errors
    /// When the server's own image is not there or does not unpack.
    ///
    /// # Cancel safety
    /// As that of [`image`](Self::image).
    pub async fn default_sandbox(&self) -> Result<Option<(&Arc<dyn Runtime>, SandboxSpec)>, StageError> {
        let common = Instance::default().common().map_err(|problem| refused(&problem))?;
        let found = self.find(&common).map_err(|problem| refused(&problem))?;
        if matches!(found, Found::Host) && self.runtimes.default_image() == HOST_IMAGE {
            let Ok(runtime) = self.runtime(&common, Form::Host) else { return Ok(None) };
            return Ok(Some((runtime, self.sandboxes.applied(SandboxSpec::new(&self.guest)))));
        }
        let warn = |warning: String| tracing::warn!("{warning}");
        let (runtime, image) = self.started_from(&common, found, warn).await?;
        Ok(Some((runtime, self.sandboxes.applied(SandboxSpec { image, ..SandboxSpec::new(&self.guest) }))))
    }

    /// Returns the runtime for a job whose image is known.
    pub(crate) fn runtime_of(&self, job: &JobContext, image: &Image) -> Result<&Arc<dyn Runtime>, StageError> {
        let common = job.instance().common().map_err(|problem| refused(&problem))?;
        self.runtime(&common, Form::of(image)).map_err(|problem| refused(&problem))
    }

    /// Returns the way out of a job's sandboxes; nothing where it asks for none.
    ///
    /// # Errors
    /// As [`sandbox_spec`](Self::sandbox_spec).
    pub fn way(&self, job: &JobContext) -> Result<Option<Way>, StageError> {
        let common = job.instance().common().map_err(|problem| refused(&problem))?;
        self.egress.way(&common.network).map_err(|problem| refused(&problem))
    }

    /// Returns what to start for a job from an image: its network and its limits.
    ///
    /// # Errors
    /// When the request has a field that [`check`](Self::check) refuses.
    pub fn sandbox_spec(&self, job: &JobContext, image: Image) -> Result<SandboxSpec, StageError> {
        let common = job.instance().common().map_err(|problem| refused(&problem))?;
        let mut spec = SandboxSpec::new(&self.guest);
        spec.image = image;
        spec.fakeroot = common.fakeroot;
        if common.network == NetworkChoice::Host {
            spec.network = Network::Host;
        }
        spec = self.sandboxes.with(&common.limits).applied(spec);
        spec.start_timeout = job.remaining(Some(self.limits.sandbox_start));
        Ok(spec)
    }
}

/// Names a field of an instance as a request has it.
fn of_instance(problem: Malformed) -> Malformed {
    Malformed { field: format!("instance.{}", problem.field), ..problem }
}

/// The failure of a job whose request names what cannot be had.
fn refused(problem: &Malformed) -> StageError {
    let class = match problem.field.as_str() {
        "instance.image" => FailureClass::Image,
        _ => FailureClass::Handler,
    };
    StageError::text(class, problem.to_string())
}
