//! Images that are made of layers: what is found in a layout or an archive, and how it is laid down.

use std::{
    fs::File,
    io::{self, Read, Write as _},
    path::Path,
    sync::Arc,
};

use super::{
    ImageError,
    archive::Archive,
    docker,
    layers::Layers,
    meter::Meter,
    notes::Notes,
    oci::{Config, Files, INDEX, Reader},
    part::{Checked, Packing, Part, Watched, unpacked},
    source::Choice,
};
use crate::{SandboxUser, store::Digest};

/// What is expected in an archive.
#[derive(Clone, Debug)]
pub(super) enum Wanted {
    /// What `docker save` writes.
    Saved,
    /// An OCI layout.
    Layout(Choice),
    /// One of both.
    Any,
}

/// The layers of an image, lowest first.
pub(super) struct Stack {
    pub(super) digest: Digest,
    pub(super) config: Config,
    layers: Vec<Layer>,
}

struct Layer {
    name: String,
    part: Part,
    expected: Expected,
}

/// What has to have a digest: what lies there, or what it unpacks to.
enum Expected {
    Packed(Digest),
    Unpacked(Digest),
}

/// What came of laying them down.
pub(super) struct Laid {
    pub(super) notes: Notes,
    pub(super) entries: u64,
    pub(super) bytes: u64,
}

/// Opens a tar with an image in it.
pub(super) fn open_archive(image: &str, file: Arc<File>) -> Result<Files, ImageError> {
    Archive::open(file).map(Files::Archive).map_err(|error| damaged(image, "the archive", &error))
}

/// Returns a tar that can be read at any place: the file itself, or what it unpacks to, written to `plain`.
pub(super) fn plain_file(file: &Arc<File>, len: u64, plain: &Path, meter: &Meter<'_>) -> Result<Arc<File>, ImageError> {
    let part = Part::new(Arc::clone(file), 0, len);
    let mut start = [0; 8];
    let n_read = part.peek(&mut start).map_err(|error| damaged(meter.image, "the archive", &error))?;
    if Packing::of(&start[..n_read]) == Packing::Plain {
        return Ok(Arc::clone(file));
    }
    meter.progress.begin("decompress", Some(len));
    let at = |error| ImageError::at("write", plain, error);
    let mut to = File::options().read(true).write(true).create_new(true).open(plain).map_err(at)?;
    let input = Watched { inner: part, progress: meter.progress };
    let mut input = unpacked(input).map_err(|error| damaged(meter.image, "the archive", &error))?;
    let mut buffer = vec![0; 256 << 10];
    loop {
        match input.read(&mut buffer) {
            Ok(0) => return Ok(Arc::new(to)),
            Ok(n_read) => {
                meter.data(n_read as u64)?;
                to.write_all(&buffer[..n_read]).map_err(at)?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(damaged(meter.image, "the archive", &error)),
        }
    }
}

/// Finds the image that is wanted.
pub(super) fn find(reader: &Reader<'_>, wanted: &Wanted) -> Result<Stack, ImageError> {
    let choice = match wanted {
        Wanted::Saved => return saved(reader),
        Wanted::Any if docker::is_one(reader.files) => return saved(reader),
        Wanted::Any => &Choice::Only,
        Wanted::Layout(choice) => choice,
    };
    if matches!(reader.files, Files::Archive(archive) if !archive.has(INDEX)) {
        return Err(no_image(reader.image));
    }
    let manifest = reader.find(choice)?;
    let config = reader.config(&manifest)?;
    let mut layers = Vec::new();
    for descriptor in &manifest.layers {
        reader.check_layer(descriptor)?;
        let (digest, part) = reader.blob(descriptor)?;
        layers.push(Layer { name: format!("blob {digest}"), part, expected: Expected::Packed(digest) });
    }
    Ok(Stack { digest: manifest.digest, config, layers })
}

fn saved(reader: &Reader<'_>) -> Result<Stack, ImageError> {
    if !docker::is_one(reader.files) {
        return Err(no_image(reader.image));
    }
    let saved = docker::find(reader)?;
    let layer = |layer: docker::SavedLayer| Layer {
        name: format!("layer {}", layer.name),
        part: layer.part,
        expected: Expected::Unpacked(layer.diff_id),
    };
    Ok(Stack { digest: saved.digest, config: saved.config, layers: saved.layers.into_iter().map(layer).collect() })
}

fn no_image(image: &str) -> ImageError {
    let problem =
        "is a tar without an image in it: expected manifest.json, as docker save writes it, or an OCI layout's \
                   index.json; a tar of an image's files is to be unpacked into a folder first"
            .to_owned();
    ImageError::Source { image: image.to_owned(), problem }
}

fn damaged(image: &str, what: &str, error: &io::Error) -> ImageError {
    let problem = match error.kind() {
        io::ErrorKind::UnexpectedEof => "ends too early".to_owned(),
        _ => error.to_string(),
    };
    ImageError::Damaged { image: image.to_owned(), what: what.to_owned(), problem }
}

impl Stack {
    /// Returns the size of all layers as they lie there.
    pub(super) fn packed_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.part.len()).sum()
    }

    /// Lays all of them over one another in the empty folder `root`. Each is checked against its digest.
    pub(super) fn lay(&self, root: &Path, owner: Option<SandboxUser>, meter: &Meter<'_>) -> Result<Laid, ImageError> {
        let mut layers = Layers::begin(root, owner, meter)?;
        for layer in &self.layers {
            let unreadable = |error: io::Error| damaged(meter.image, &layer.name, &error);
            let input = Watched { inner: layer.part.clone(), progress: meter.progress };
            match &layer.expected {
                Expected::Packed(digest) => {
                    let mut packed = Checked::new(input);
                    let tar = layers.add(&layer.name, unpacked(&mut packed).map_err(unreadable)?)?;
                    layers.drain(&layer.name, tar)?;
                    // What follows the packed data is part of the blob all the same.
                    layers.drain(&layer.name, &mut packed)?;
                    packed.check(digest).map_err(unreadable)?;
                }
                Expected::Unpacked(digest) => {
                    let plain = Checked::new(unpacked(input).map_err(unreadable)?);
                    let mut plain = layers.add(&layer.name, plain)?;
                    layers.drain(&layer.name, &mut plain)?;
                    plain.check(digest).map_err(unreadable)?;
                }
            }
        }
        let (notes, entries, bytes) = layers.finish()?;
        Ok(Laid { notes, entries, bytes })
    }
}
