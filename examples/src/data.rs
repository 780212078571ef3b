//! The data sets that can be trained with.

use std::{io, path::PathBuf};

use crate::{digits, fashion_mnist, samples::Images};

/// A data set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Data {
    /// Handwritten digits, which are always there.
    Digits,
    /// Images of clothes, in this folder.
    FashionMnist(PathBuf),
}

impl Data {
    /// The images for training, and those that no training sees.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn load(&self) -> io::Result<(Images, Images)> {
        match self {
            Self::Digits => Ok(digits::load()),
            Self::FashionMnist(folder) => fashion_mnist::load(folder),
        }
    }

    /// Pixels of one image.
    pub const fn pixels(&self) -> usize {
        match self {
            Self::Digits => digits::PIXELS,
            Self::FashionMnist(_) => fashion_mnist::PIXELS,
        }
    }

    /// What the images show.
    pub const fn noun(&self) -> &'static str {
        match self {
            Self::Digits => "digits",
            Self::FashionMnist(_) => "images of clothes",
        }
    }
}
