//! Settings from environment variables.

use std::collections::BTreeMap;

use super::{Mtu, OnDemandPaging, Rdma, Setting, SettingError};

impl Rdma {
    /// The settings in the process's environment. See [`from_variables`](Self::from_variables).
    ///
    /// # Errors
    /// [`SettingError`].
    pub fn from_environment() -> Result<Self, SettingError> {
        let names = Setting::ALL.into_iter().flat_map(names);
        // Bytes that are not Unicode are replaced. No setting accepts the result, which the error shows.
        let read = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        Self::from_variables(&names.filter_map(|name| Some((name.to_owned(), read(name)?))).collect())
    }

    /// The settings in `variables`, which are names and values. For each setting, the project's own variable
    /// ([`Setting::variable`]) has precedence over those of TensorFlow's verbs plugin (listed by the setting's
    /// `Display`). If two variables of the plugin are set for one setting, they must agree. An empty value counts as
    /// not set.
    ///
    /// # Errors
    /// [`SettingError::Invalid`] for a value that its setting cannot have, [`SettingError::Conflict`] for two original
    /// variables of one setting that differ.
    pub fn from_variables(variables: &BTreeMap<String, String>) -> Result<Self, SettingError> {
        let variables = Variables(variables);
        Ok(Self {
            device: variables.read(Setting::Device, |name| Some(name.to_owned()))?,
            port: variables.number(Setting::Port)?,
            gid_index: variables.number(Setting::GidIndex)?,
            pkey_index: variables.number(Setting::PkeyIndex)?,
            queue_depth: variables.number(Setting::QueueDepth)?,
            timeout: variables.number(Setting::Timeout)?,
            retry_count: variables.number(Setting::RetryCount)?,
            receiver_retry_count: variables.number(Setting::ReceiverRetryCount)?,
            service_level: variables.number(Setting::ServiceLevel)?,
            mtu: variables.read(Setting::Mtu, |bytes| Mtu::from_bytes(number(bytes)?))?,
            traffic_class: variables.number(Setting::TrafficClass)?,
            on_demand_paging: variables.read(Setting::OnDemandPaging, OnDemandPaging::from_name)?,
        })
    }
}

fn names(setting: Setting) -> impl Iterator<Item = &'static str> {
    [setting.variable()].into_iter().chain(setting.original_variables().iter().copied())
}

struct Variables<'map>(&'map BTreeMap<String, String>);

impl Variables<'_> {
    fn number<T: TryFrom<u32> + PartialEq>(&self, setting: Setting) -> Result<Option<T>, SettingError> {
        self.read(setting, |text| {
            let value = number(text).filter(|value| setting.range().contains(value))?;
            T::try_from(value).ok()
        })
    }

    fn read<T: PartialEq>(
        &self,
        setting: Setting,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, SettingError> {
        let parsed = |name: &'static str| {
            let text = self.0.get(name).filter(|text| !text.is_empty())?;
            Some(parse(text).ok_or_else(|| setting.invalid(name, text)).map(|value| (name, text, value)))
        };
        if let Some(own) = parsed(setting.variable()) {
            return own.map(|(_, _, value)| Some(value));
        }
        let mut found: Option<(&'static str, &String, T)> = None;
        for name in setting.original_variables() {
            let Some(parsed) = parsed(name) else { continue };
            let (name, text, value) = parsed?;
            if let Some((first, first_text, _)) = found.filter(|(.., before)| *before != value) {
                return Err(SettingError::Conflict {
                    first,
                    first_value: first_text.clone(),
                    second: name,
                    second_value: text.clone(),
                    instead: setting.variable(),
                });
            }
            found = Some((name, text, value));
        }
        Ok(found.map(|(.., value)| value))
    }
}

/// Parses digits only: no sign, no space, nothing after them.
fn number(text: &str) -> Option<u32> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(variables: &[(&str, &str)]) -> Result<Rdma, SettingError> {
        let map = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Rdma::from_variables(&map.collect())
    }

    /// The value of a setting as a number.
    fn value(settings: &Rdma, setting: Setting) -> Option<u32> {
        match setting {
            Setting::Device | Setting::OnDemandPaging => None,
            Setting::Port => settings.port.map(u32::from),
            Setting::GidIndex => settings.gid_index.map(u32::from),
            Setting::PkeyIndex => settings.pkey_index.map(u32::from),
            Setting::QueueDepth => settings.queue_depth,
            Setting::Timeout => settings.timeout.map(u32::from),
            Setting::RetryCount => settings.retry_count.map(u32::from),
            Setting::ReceiverRetryCount => settings.receiver_retry_count.map(u32::from),
            Setting::ServiceLevel => settings.service_level.map(u32::from),
            Setting::Mtu => settings.mtu.map(Mtu::bytes),
            Setting::TrafficClass => settings.traffic_class.map(u32::from),
        }
    }

    fn numbers() -> impl Iterator<Item = Setting> {
        let is_number = |setting: &Setting| !matches!(setting, Setting::Device | Setting::OnDemandPaging);
        Setting::ALL.into_iter().filter(is_number)
    }

    #[test]
    fn an_empty_environment_says_nothing() {
        assert_eq!(from(&[]), Ok(Rdma::default()));
        for name in Setting::ALL.into_iter().flat_map(names) {
            assert_eq!(from(&[(name, "")]), Ok(Rdma::default()), "{name}");
        }
    }

    #[test]
    fn every_name_sets_its_setting_and_no_other() {
        for setting in numbers() {
            for name in names(setting) {
                let settings = from(&[(name, &setting.range().end().to_string())]).unwrap();
                for other in numbers() {
                    let expected = (other == setting).then_some(*setting.range().end());
                    assert_eq!(value(&settings, other), expected, "{name} and {}", other.field());
                }
            }
        }
        for name in names(Setting::Device) {
            let expected = Rdma { device: Some("mlx5_0".into()), ..Rdma::default() };
            assert_eq!(from(&[(name, "mlx5_0")]), Ok(expected));
        }
    }

    #[test]
    fn both_ends_of_each_range_are_taken_and_nothing_beyond() {
        for setting in numbers() {
            let (first, last) = (*setting.range().start(), *setting.range().end());
            for name in names(setting) {
                for taken in [first, last] {
                    let settings = from(&[(name, &taken.to_string())]).unwrap();
                    assert_eq!(value(&settings, setting), Some(taken), "{name}={taken}");
                }
                let below = first.checked_sub(1).map(|below| below.to_string());
                let beyond = [(u64::from(last) + 1).to_string(), "256000000000".to_owned()];
                for refused in below.into_iter().chain(beyond) {
                    let error = from(&[(name, &refused)]).unwrap_err();
                    assert_eq!((error.name(), error.value()), (name, refused.as_str()));
                    assert!(error.to_string().contains(": use "), "{error}");
                }
            }
        }
    }

    #[test]
    fn what_is_no_number_is_refused_with_its_name() {
        for setting in numbers() {
            for name in names(setting) {
                for text in ["seven", " 7", "7 ", "+7", "-1", "0x7", "7.0", "7abc", "\u{FFFD}"] {
                    let error = from(&[(name, text)]).unwrap_err();
                    assert_eq!((error.name(), error.value()), (name, text), "{error}");
                }
            }
        }
    }

    #[test]
    fn packets_have_five_sizes() {
        for name in names(Setting::Mtu) {
            for bytes in [256, 512, 1024, 2048, 4096] {
                let settings = from(&[(name, &bytes.to_string())]).unwrap();
                assert_eq!(value(&settings, Setting::Mtu), Some(bytes));
            }
            for bytes in ["1500", "0", "9000", "257"] {
                let error = from(&[(name, bytes)]).unwrap_err().to_string();
                assert!(error.contains(name) && error.contains("2048 or 4096"), "{error}");
            }
        }
    }

    #[test]
    fn paging_has_three_words() {
        let name = Setting::OnDemandPaging.variable();
        for (word, expected) in [
            ("auto", OnDemandPaging::Auto),
            ("never", OnDemandPaging::Never),
            ("require", OnDemandPaging::Require),
        ] {
            let expected = Rdma { on_demand_paging: Some(expected), ..Rdma::default() };
            assert_eq!(from(&[(name, word)]), Ok(expected));
        }
        for word in ["1", "Auto", "always", " auto"] {
            let error = from(&[(name, word)]).unwrap_err();
            assert_eq!((error.name(), error.value()), (name, word));
            assert!(error.to_string().ends_with(": use auto, never or require"), "{error}");
        }
    }

    #[test]
    fn the_projects_own_name_goes_before_the_originals() {
        for setting in numbers() {
            let (own, theirs) = (setting.range().start().to_string(), setting.range().end().to_string());
            let mut variables = vec![(setting.variable(), own.as_str())];
            // These variables are not read: a script for another program may have set them to any value.
            variables.extend(setting.original_variables().iter().map(|name| (*name, theirs.as_str())));
            variables.extend(setting.original_variables().first().map(|name| (*name, "nonsense")));
            let settings = from(&variables).unwrap();
            assert_eq!(value(&settings, setting), Some(*setting.range().start()), "{}", setting.field());
        }
    }

    #[test]
    fn two_names_that_differ_are_an_error_naming_both() {
        let mut pairs = 0;
        for setting in Setting::ALL {
            let &[source, readme] = setting.original_variables() else { continue };
            pairs += 1;
            let (first, last) = (setting.range().start().to_string(), setting.range().end().to_string());
            let error = from(&[(source, &first), (readme, &last)]).unwrap_err();
            let text = error.to_string();
            for part in [source, &first, readme, &last, setting.variable()] {
                assert!(text.contains(part), "{part} is missing: {text}");
            }
            let agreed = from(&[(source, &last), (readme, &last)]).unwrap();
            assert_eq!(value(&agreed, setting), Some(*setting.range().end()));
        }
        assert_eq!(pairs, 6);
    }

    #[test]
    fn the_builder_goes_before_the_environment() {
        let environment = from(&[("RDMA_MTU", "512"), ("TENSORWIRE_RDMA_PORT", "2")]).unwrap();
        let builder = Rdma { mtu: Some(Mtu::Bytes4096), ..Rdma::default() };
        let expected = Rdma { mtu: Some(Mtu::Bytes4096), port: Some(2), ..Rdma::default() };
        assert_eq!(builder.or(environment), expected);
    }
}
