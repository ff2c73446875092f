# Chromium without a desktop, and fonts.
FROM debian:trixie

ENV LANG=C.UTF-8 LC_ALL=C.UTF-8 TZ=UTC

# Documentation and translations of packages are left out, but not their licences.
COPY dpkg-options /etc/dpkg/dpkg.cfg.d/atoll

RUN export DEBIAN_FRONTEND=noninteractive \
    && apt-get update -q \
    && apt-get install -y -q --no-install-recommends \
        ca-certificates chromium fontconfig fonts-dejavu-core fonts-noto-cjk fonts-noto-color-emoji tzdata \
    && fc-cache -f \
    && apt-get clean && rm -rf /var/lib/apt/lists/* /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log

COPY chromium-flags /etc/chromium.d/atoll
RUN rm /etc/chromium.d/dev-shm \
    && useradd --create-home --uid 1000 --shell /bin/bash user \
    && mkdir /workspace && chown -R user:user /home/user /workspace \
    && ln -s /run/atoll/sudo /usr/bin/sudo

LABEL atoll.sudo=true

WORKDIR /workspace
CMD ["bash"]
