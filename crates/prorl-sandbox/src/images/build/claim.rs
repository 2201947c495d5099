//! Who builds an output: one builder at a time, among threads, processes and machines that share the state folder.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    time::Duration,
};

use crate::{
    images::{Cancel, ImageError},
    store::{
        claim::{self, Claim, Turn},
        pulse::{self, Pulse},
    },
};

/// How long the first wait for another's build is, and the longest.
const WAITS: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(100)];

/// The folders of a state that tell who builds.
const OWNERS: &str = "owners";
const CLAIMS: &str = "claims";

/// Takes turns in one state folder.
#[derive(Debug)]
pub(super) struct Turns {
    pulse: Arc<Pulse>,
    owners: PathBuf,
    claims: PathBuf,
}

/// A turn that was had, until it is dropped.
#[derive(Debug)]
pub(super) struct Had {
    _claim: Claim,
    /// Whether somebody else had it meanwhile.
    pub(super) has_waited: bool,
}

impl Turns {
    /// Makes the folders and marks this process in them.
    pub(super) fn open(state: &Path) -> Result<Self, ImageError> {
        let [owners, claims] = [OWNERS, CLAIMS].map(|name| state.join(name));
        for folder in [&owners, &claims] {
            fs::create_dir_all(folder).map_err(|error| ImageError::at("make", folder, error))?;
        }
        let at = |error| ImageError::at("mark this process in", &owners, error);
        let pulse = Arc::new(Pulse::start(&owners).map_err(at)?);
        Ok(Self { pulse, owners, claims })
    }

    /// Tells whether nobody builds by this token any more.
    pub(super) fn is_gone(&self, token: &str) -> bool {
        pulse::has_ended(&self.pulse, &self.owners.join(token)).unwrap_or(false)
    }

    /// Removes claims and marks of the dead, and returns how many they were.
    pub(super) fn sweep(&self) -> Result<usize, ImageError> {
        let at = |folder: &Path| {
            let folder = folder.to_owned();
            move |error| ImageError::at("remove what the dead have left in", &folder, error)
        };
        let n_claims = claim::remove_dead(&self.pulse, &self.claims).map_err(at(&self.claims))?;
        Ok(n_claims + pulse::remove_dead(&self.pulse, &self.owners).map_err(at(&self.owners))?)
    }

    /// Returns a name that no other builder uses.
    pub(super) fn token(&self) -> &str {
        self.pulse.token()
    }

    /// Waits for the turn to build what `key` names: letters and digits. Tells once whom it waits for.
    pub(super) fn wait(&self, key: &str, cancel: &Cancel, on_wait: impl Fn(&str)) -> Result<Had, ImageError> {
        let at = |error: io::Error| ImageError::at("claim a build in", &self.claims, error);
        let mut wait = WAITS[0];
        let mut has_waited = false;
        // Nobody sends: what this gives is a wait.
        let (_nobody, never) = mpsc::channel::<()>();
        loop {
            if cancel.is_cancelled() {
                return Err(ImageError::Cancelled);
            }
            match claim::take(&self.pulse, &self.claims, key).map_err(at)? {
                Turn::Mine(claim) => return Ok(Had { _claim: claim, has_waited }),
                Turn::Of(_) if has_waited => {}
                Turn::Of(who) => on_wait(&who),
            }
            has_waited = true;
            let _ = never.recv_timeout(wait);
            wait = (wait * 2).min(WAITS[1]);
        }
    }
}
