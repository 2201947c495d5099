//! Making an image that is not there, once.

use std::{path::Path, sync::Arc, thread, time::Duration};

use super::{
    EnsureError, Filled, HeldImage, ImageStore, SourceKey, StoreError, StoredImage,
    claim::{self, Turn},
    disk::{self, CLAIMS, IMAGE_RECORD, USED},
    entry::size_of,
    flight::{Outcome, Seat},
    hold::{self, Hold, Removal, Thing},
    staging::Staging,
};

/// Time between two looks at what others do, from the first one on.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));

/// How often the place of an image that is there and cannot be used, or comes and goes, is tried.
const MAX_TRIES: u32 = 10;

impl ImageStore {
    /// Returns the image of a source; if nobody has made it yet, it is made by `make`, which is given the empty folder that
    /// becomes its root. It is made once, however many threads, processes and machines ask for it at once; the others wait.
    /// Blocks for as long as that takes; a hit takes a few file operations, no more with more images.
    ///
    /// `on_wait` is called once, with the name of whom it waits for, if it has to. `cancel` is asked every 100 ms at most while
    /// it waits; `make` has to look after itself. If the one that others wait for fails, its caller gets the error, and the
    /// next one makes it.
    ///
    /// Afterwards images that nobody uses are removed, the one unused for longest first, until the store holds no more than
    /// [`StoreConfig::max_bytes`](super::StoreConfig::max_bytes).
    ///
    /// # Errors
    /// The maker's own; [`StoreError::OtherOwner`] for an image of another user that is in use; [`StoreError::TooLarge`] for an image that would not fit into an empty store; what the system refuses.
    /// Nothing of the image is left then.
    pub fn ensure<E>(
        &self,
        key: &SourceKey,
        cancel: &dyn Fn() -> bool,
        on_wait: &dyn Fn(&str),
        make: impl FnOnce(&Path) -> Result<Filled, E>,
    ) -> Result<StoredImage, EnsureError<E>> {
        let mut wait = Wait { cancel, tell: on_wait, is_told: false, pause: PAUSES.0 };
        loop {
            if let Some(image) = self.usable(key)? {
                return Ok(image);
            }
            match self.inner.flights.board(key) {
                Seat::Passenger(flight) => loop {
                    wait.tell::<E>("another thread of this process")?;
                    match flight.wait(PAUSES.1) {
                        Outcome::Made(image) => return Ok(image),
                        Outcome::Failed => break,
                        Outcome::Open => {}
                    }
                },
                Seat::Pilot(pilot) => {
                    let image = self.make_or_wait(key, &mut wait, make)?;
                    pilot.land(&image);
                    return Ok(image);
                }
            }
        }
    }

    /// Makes it, or waits for another process that does.
    fn make_or_wait<E>(
        &self,
        key: &SourceKey,
        wait: &mut Wait<'_>,
        make: impl FnOnce(&Path) -> Result<Filled, E>,
    ) -> Result<StoredImage, EnsureError<E>> {
        let _claim = loop {
            match self.claim(key)? {
                Turn::Mine(claim) => break claim,
                Turn::Of(who) => wait.tell::<E>(&who)?,
            }
            wait.pause();
            if let Some(image) = self.usable(key)? {
                return Ok(image);
            }
        };
        // Whoever had the turn before may have just made it.
        if let Some(image) = self.usable(key)? {
            return Ok(image);
        }
        let mut staging = Staging::new(&self.inner.disk)?;
        let filled = make(&staging.root());
        if staging.is_lost() {
            return Err(staging.lost().into());
        }
        let image = self.publish(&mut staging, filled.map_err(EnsureError::Make)?)?;
        if let Err(error) = self.remember(key, &image.filled().digest) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "an image will be made again, because its source is not remembered");
        }
        if let Some(max_bytes) = self.config().max_bytes {
            self.evict(max_bytes);
        }
        self.inner.janitor.sweep(&self.inner.disk);
        Ok(image)
    }

    fn claim(&self, key: &SourceKey) -> Result<Turn, StoreError> {
        let folder = self.inner.disk.folder(CLAIMS);
        let pulse = self.inner.disk.pulse()?;
        claim::take(&pulse, &folder, &disk::hash(key.as_str()))
            .map_err(|source| StoreError::at("claim an image in", &folder, source))
    }

    /// Returns the image of a source; removes it where it is damaged, or another user's.
    fn usable(&self, key: &SourceKey) -> Result<Option<StoredImage>, StoreError> {
        match self.known(key) {
            Err(error @ (StoreError::Damaged { .. } | StoreError::OtherOwner { .. })) => {
                let Some(digest) = self.digest_of(key)? else { return Ok(None) };
                self.remove_unusable(&Thing::image(&digest), error).map(|()| None)
            }
            found => found,
        }
    }

    /// Removes what cannot be used by anybody who does not use it already.
    fn remove_unusable(&self, thing: &Thing, error: StoreError) -> Result<(), StoreError> {
        match hold::set_aside(&self.inner.disk, thing)? {
            Removal::Aside(path) => {
                tracing::warn!(%error, "an image that cannot be used is made again");
                self.inner.janitor.remove(&self.inner.disk, path);
                Ok(())
            }
            Removal::Absent => Ok(()),
            Removal::InUse => Err(error),
        }
    }

    /// Makes what was filled an image of the store, or takes the same one that is there.
    fn publish(&self, staging: &mut Staging, filled: Filled) -> Result<StoredImage, StoreError> {
        let size = size_of(filled.bytes, filled.entries);
        if let Some(limit) = self.config().max_bytes.filter(|limit| size > *limit) {
            return Err(StoreError::TooLarge { image: filled.source, size, limit });
        }
        let thing = Thing::image(&filled.digest);
        let place = thing.place(&self.inner.disk);
        let text = serde_json::to_vec_pretty(&filled)
            .map_err(|error| StoreError::at("write", &place.join(IMAGE_RECORD), error.into()))?;
        staging.write(IMAGE_RECORD, &text)?;
        staging.write(USED, b"")?;
        let mut tries = 0;
        loop {
            // The reference first: it is in use from the moment on that it is there.
            let hold = Hold::take(&self.inner, thing.clone())?;
            if staging.publish(&place)? {
                let root = place.join(disk::ROOT);
                return Ok(StoredImage { held: Arc::new(HeldImage { filled, root, _hold: hold }), is_new: true });
            }
            drop(hold);
            tries += 1;
            match self.image(&filled.digest) {
                Ok(Some(image)) => return Ok(image),
                Ok(None) if tries < MAX_TRIES => {}
                Ok(None) => {
                    let source = std::io::Error::from_raw_os_error(libc::EEXIST);
                    return Err(StoreError::at("publish", &place, source));
                }
                Err(error @ (StoreError::Damaged { .. } | StoreError::OtherOwner { .. })) if tries < MAX_TRIES => {
                    self.remove_unusable(&thing, error)?;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// A wait for others.
struct Wait<'a> {
    cancel: &'a dyn Fn() -> bool,
    tell: &'a dyn Fn(&str),
    is_told: bool,
    pause: Duration,
}

impl Wait<'_> {
    /// Tells for whom it waits, once; fails if nobody waits any more.
    fn tell<E>(&mut self, who: &str) -> Result<(), EnsureError<E>> {
        if (self.cancel)() {
            return Err(EnsureError::Cancelled);
        }
        if !self.is_told {
            self.is_told = true;
            (self.tell)(who);
        }
        Ok(())
    }

    fn pause(&mut self) {
        thread::park_timeout(self.pause);
        self.pause = (self.pause * 2).min(PAUSES.1);
    }
}
